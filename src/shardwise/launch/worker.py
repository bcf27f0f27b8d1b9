"""One rank: join the process group, read the plan, train."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from shardwise.errors import UserError
from shardwise.launch.ranks import RENDEZVOUS_VARIABLE
from shardwise.plan.plan import Plan
from shardwise.training.loop import run

# Long enough for one rank to tokenise a corpus while the others wait.
TIMEOUT = timedelta(minutes=30)
# From linux/prctl.h: the signal to get when the parent dies.
_PR_SET_PDEATHSIG = 1


@record
def main(plan_path: str) -> None:
    """Train as the plan says; `record` writes down what went wrong for the launcher to show."""
    _leave_with_launcher()
    run_rank(Plan.load(Path(plan_path)))


def run_rank(plan: Plan) -> None:
    """The life of one rank."""
    join_process_group(plan.cluster.device)
    log = _open_log(plan.run_dir / "logs")
    is_first = dist.get_rank() == 0

    def say(text: str) -> None:
        if is_first:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
            os.write(log, f"{text}\n".encode())

    run(plan, say)
    dist.destroy_process_group()


def join_process_group(device: str) -> None:
    """gloo for host tensors everywhere, NCCL for those of GPUs."""
    if device == "cuda":
        local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local)
        _join("cpu:gloo,cuda:nccl", local)
    else:
        _join("gloo", None)


def _join(backend: str, device: torch.device | None) -> None:
    """In the file that our launcher names, or at the address that torchrun gives."""
    dist.init_process_group(
        backend,
        init_method=os.environ.get(RENDEZVOUS_VARIABLE, "env://"),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=TIMEOUT,
        device_id=device,
    )


def _leave_with_launcher() -> None:
    """A launcher that is killed must not leave ranks that hold the devices: they save and stop."""
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


def _open_log(root: Path) -> int:
    """logs/attempt-N/rank-R.log takes all that libraries print; rank 0's stdout is the console."""
    attempt = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        attempt += len(list(root.glob("attempt-*"))) + 1
    dist.broadcast(attempt, src=0)
    folder = root / f"attempt-{attempt.item()}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{dist.get_rank()}.log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stderr.fileno())
    if dist.get_rank() != 0:
        os.dup2(log, sys.stdout.fileno())
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    warnings.simplefilter("default")
    return log


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except UserError as error:
        # `record` has written the error down; the exit code tells the launcher its kind.
        sys.exit(error.code)
