"""A rank and the process that started it: the rank ends with its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

# Process ids of our own launchers. The agent of `shardwise torchrun` sets the second; it reads the
# error files of its ranks and reports for them.
LAUNCHER_VARIABLE = "SHARDWISE_LAUNCHER"
AGENT_VARIABLE = "SHARDWISE_AGENT"
# From linux/prctl.h: the signal to get when the parent dies.
PR_SET_PDEATHSIG = 1


def launcher_of(environ: Mapping[str, str]) -> int | None:
    """The process id of our launcher that started this rank; None under another launcher."""
    said = environ.get(AGENT_VARIABLE) or environ.get(LAUNCHER_VARIABLE)
    return int(said) if said else None


def leave_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Make this rank save and stop when its launcher is killed, so that no rank is left on the
    devices."""
    launcher = launcher_of(environ) or os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        # The launcher died before this process could ask to be notified.
        os.kill(os.getpid(), signal.SIGTERM)
