"""A rank that does nothing. The last one only notes a request to stop, as ranks that train do."""

from __future__ import annotations

import os
import signal
import time

if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: None)
print(f"rank {os.environ['RANK']} idles", flush=True)
while True:
    time.sleep(60)
