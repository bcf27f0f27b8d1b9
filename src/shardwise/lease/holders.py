"""Which processes of this machine hold the kernel's lock on a file."""

from __future__ import annotations

import os
from pathlib import Path


def lock_holders(path: Path) -> list[int]:
    """The ids of the processes that hold the lock, as far as /proc shows them to this user.

    A lock belongs to an open file, which children inherit. After the death of the process that took
    it, its children hold it.
    """
    wanted = path.stat()
    return sorted(
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if any(_holds(folder, name, wanted) for name in _open_files(folder))
    )


def _open_files(process: Path) -> list[str]:
    try:
        return os.listdir(process / "fd")
    except OSError:  # it is gone, or another user's
        return []


def _holds(process: Path, name: str, wanted: os.stat_result) -> bool:
    try:
        found = (process / "fd" / name).stat()
        if (found.st_dev, found.st_ino) != (wanted.st_dev, wanted.st_ino):
            return False
        return "FLOCK" in (process / "fdinfo" / name).read_text(encoding="ascii")
    except OSError:
        return False
