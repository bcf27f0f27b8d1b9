"""Steps of rank 0 that take seconds while a file is there, so that whatever is to happen during a
run does, on any machine."""

from __future__ import annotations

import os
from pathlib import Path

_CODE = """
import os
if "RANK" in os.environ:
    import time
    from shardwise.training import loop

    tell = loop.tell_step

    def tell_and_wait(*args):
        tell(*args)
        if os.path.exists(os.environ["HOLD"]):
            time.sleep({seconds})

    loop.tell_step = tell_and_wait
"""


class SlowSteps:
    """The variables that ranks need for it. Steps are slow from `hold` to `release`."""

    def __init__(self, folder: Path, seconds: float) -> None:
        place = folder / "slow"
        place.mkdir()
        (place / "sitecustomize.py").write_text(_CODE.format(seconds=seconds))
        self._file = folder / "hold"
        path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
        self.environ = {"PYTHONPATH": path, "HOLD": str(self._file)}

    def hold(self) -> None:
        self._file.touch()

    def release(self) -> None:
        self._file.unlink()
