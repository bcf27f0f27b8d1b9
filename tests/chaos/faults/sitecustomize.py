"""Python loads this at its start where the directory is on PYTHONPATH: ranks get faults."""

from __future__ import annotations

import os
from pathlib import Path

if "RANK" in os.environ and "FAULTS" in os.environ:
    from rank_faults import install

    install(Path(os.environ["FAULTS"]), int(os.environ["RANK"]))
