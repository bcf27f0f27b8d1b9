"""How a rank joins the others, and how it leaves with the launcher that started it."""

from __future__ import annotations

import ctypes
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.launch.launcher import RENDEZVOUS_VARIABLE

# Long enough for one rank to tokenise a corpus while the others wait.
TIMEOUT = timedelta(minutes=30)
# From linux/prctl.h: the signal to get when the parent dies.
_PR_SET_PDEATHSIG = 1


def join_process_group(device: str, timeout: timedelta = TIMEOUT) -> None:
    """gloo for host tensors everywhere, NCCL for those of GPUs."""
    if device == "cuda":
        local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local)
        _join("cpu:gloo,cuda:nccl", local, timeout)
    else:
        _join("gloo", None, timeout)


def leave_with_launcher() -> None:
    """A launcher that is killed must not leave ranks that hold the devices: they save and stop."""
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


def _join(backend: str, device: torch.device | None, timeout: timedelta) -> None:
    """In the file that our launcher names, or at the address that torchrun gives."""
    dist.init_process_group(
        backend,
        init_method=os.environ.get(RENDEZVOUS_VARIABLE, "env://"),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        device_id=device,
    )
