"""A rank and the process that started it: it leaves with its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

# Whom ranks of our own launchers belong to: a process id. The second is set by the agent of
# `shardwise torchrun`, which reads the error files of its ranks and speaks for them.
LAUNCHER_VARIABLE = "SHARDWISE_LAUNCHER"
AGENT_VARIABLE = "SHARDWISE_AGENT"
# From linux/prctl.h: the signal to get when the parent dies.
_PR_SET_PDEATHSIG = 1


def launcher_of(environ: Mapping[str, str]) -> int | None:
    """The process id of the launcher of ours that started this rank; None of another's."""
    said = environ.get(AGENT_VARIABLE) or environ.get(LAUNCHER_VARIABLE)
    return int(said) if said else None


def leave_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """A launcher that is killed must not leave ranks that hold the devices: they save and stop."""
    launcher = launcher_of(environ) or os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        # It died before this process could ask to be told.
        os.kill(os.getpid(), signal.SIGTERM)
