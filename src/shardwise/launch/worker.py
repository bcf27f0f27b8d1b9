"""One rank: join the process group, read the plan, train."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from shardwise.errors import UserError
from shardwise.launch.group import TIMEOUT, join_process_group, leave_with_launcher, open_store
from shardwise.launch.holding import hold_as_rank
from shardwise.launch.last_words import errors_naming
from shardwise.launch.meeting import meet
from shardwise.launch.peers import Peers
from shardwise.launch.say import say_on_console
from shardwise.plan.plan import Plan
from shardwise.training.loop import run


@record
def main(plan_path: str) -> None:
    """Train as the plan says; `record` writes down what went wrong for the launcher to show."""
    leave_with_launcher()
    run_rank(Plan.load(Path(plan_path)))


def run_rank(plan: Plan) -> None:
    """The life of one rank."""
    store = open_store(TIMEOUT)
    meet(Peers(store), plan)
    join_process_group(plan.cluster.device, store=store)
    is_first = dist.get_rank() == 0
    with hold_as_rank(plan.run_dir) as fence:
        path, log = _open_log(plan.run_dir / "logs")

        def say(text: str) -> None:
            if is_first:
                say_on_console(text)
                # A full disk must not end the training that the line is about.
                with suppress(OSError):
                    os.write(log, f"{text}\n".encode())

        with errors_naming(path):
            run(plan, say, fence)
    dist.destroy_process_group()


def _open_log(root: Path) -> tuple[Path, int]:
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
    return path, log


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except UserError as error:
        # `record` has written the error down; the exit code tells the launcher its kind.
        sys.exit(error.code)
