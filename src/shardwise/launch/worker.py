"""One rank: join the process group, read the plan, train."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from shardwise.launch.alive import keep_stacks
from shardwise.launch.group import TIMEOUT, join_process_group, open_store
from shardwise.launch.holding import hold_as_rank
from shardwise.launch.last_words import errors_naming
from shardwise.launch.one_plan import Agree, same_plan
from shardwise.launch.peers import Peers
from shardwise.launch.say import Lines, say_on_console, write_to, write_to_console
from shardwise.metrics.log_header import header
from shardwise.plan.planned import Plan
from shardwise.training.heartbeat import Heartbeat, Phase
from shardwise.training.rank_run import run
from shardwise.training.signals import handle_stop_signals


@record
def main(plan_path: str) -> None:
    """Train as the plan says. `record` writes an error for the launcher to show."""
    # `record` has pointed the fault handler at the console.
    keep_stacks(os.environ)
    plan = Plan.load(Path(plan_path))
    run_rank(same_plan(plan), plan.settings.train.hang_timeout_s)


def run_rank(agree: Agree, timeout_s: float | None) -> Plan:
    """The life of one rank; returns the plan that all ranks have agreed on."""
    rank = int(os.environ["RANK"])
    Heartbeat(rank, Phase.MEETING, timeout_s=timeout_s, log=keep_stacks(os.environ))
    store = open_store(TIMEOUT)
    plan = agree(Peers(store))
    join_process_group(plan.cluster.device, store=store)
    with hold_as_rank(plan.run_dir) as fence:
        path, log = _open_log(plan.run_dir / "logs")
        places = [Lines(write_to_console), Lines(write_to(log))] if rank == 0 else []

        def say(text: str) -> None:
            for lines in places:
                lines.say(text)

        heartbeat = Heartbeat(rank, Phase.READING, timeout_s=timeout_s, log=str(path))
        try:
            with errors_naming(path):
                run(plan, say, fence, heartbeat)
        except BaseException:
            heartbeat.enter(Phase.ENDING)
            raise
        finally:
            # Everything is saved by now, or cannot be, so a request to stop changes nothing.
            handle_stop_signals(signal.SIG_IGN)
    dist.destroy_process_group()
    return plan


def _open_log(root: Path) -> tuple[Path, int]:
    """logs/attempt-N/rank-R.log gets all output of libraries. Rank 0's stdout is the console.

    Without room for a log the rank trains without one.
    """
    attempt = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        attempt += len(list(root.glob("attempt-*"))) + 1
    dist.broadcast(attempt, src=0)
    folder = root / f"attempt-{attempt.item()}"
    path = folder / f"rank-{dist.get_rank()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        say_on_console(f"ALERT: {path} cannot be written: {error.strerror}")
        path, log = Path(os.devnull), os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError):  # a full disk
        os.write(log, f"{header(dist.get_rank(), dist.get_world_size())}\n".encode())
    os.dup2(log, sys.stderr.fileno())
    # A rank that hangs gets SIGABRT, and its stacks go here, even from inside a collective.
    faulthandler.enable(file=sys.stderr, all_threads=True)
    if dist.get_rank() != 0:
        os.dup2(log, sys.stdout.fileno())
    # With the time, by which the logs of ranks are merged.
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=form)
    warnings.simplefilter("default")
    return path, log
