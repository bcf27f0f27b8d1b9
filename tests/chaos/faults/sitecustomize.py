"""Python loads this at its start where the directory is on PYTHONPATH: ranks get faults, and the
machine a size that one of them can fill."""

from __future__ import annotations

import os
from pathlib import Path

# A rank on a CPU has its part of the machine's memory, which no setting makes smaller.
MACHINE_BYTES = 2 * 2**30
ask = os.sysconf


def ask_small_machine(name: str | int) -> int:
    return MACHINE_BYTES // ask("SC_PAGE_SIZE") if name == "SC_PHYS_PAGES" else ask(name)


if "FAULTS" in os.environ:
    os.sysconf = ask_small_machine

if "RANK" in os.environ and "FAULTS" in os.environ:
    from rank_faults import install

    install(Path(os.environ["FAULTS"]), int(os.environ["RANK"]))
