"""Python loads this at its start where the directory is on PYTHONPATH: the agent of
`shardwise torchrun` gets the fault that AGENT_FAULT names."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def _never_rest() -> None:
    """The rendezvous' thread is inside torch's store at any moment, and not just now and then."""
    from contextlib import suppress
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous

    make_timer, store = rendezvous._PeriodicTimer, dist.HashStore()

    def look() -> None:
        with suppress(dist.DistError):
            store.wait(["never"], timedelta(milliseconds=20))

    rendezvous._PeriodicTimer = lambda *_: make_timer(timedelta(0), look)


def _stop_while_ranks_start() -> None:
    """A request to stop comes after the last rank was started and before the agent has noted it."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    start, started = subprocess_handler.Popen, []

    def start_and_stop(*args: Any, **settings: Any) -> Any:
        process = start(*args, **settings)
        started.append(process.pid)
        print("started", process.pid, flush=True)
        if len(started) == int(settings["env"]["LOCAL_WORLD_SIZE"]):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return process

    subprocess_handler.Popen = start_and_stop


def _swallow_a_stop() -> None:
    """A request to stop comes inside a block that swallows what its handler raises."""
    from contextlib import suppress

    from torch.distributed.elastic.agent.server import api

    put_metric, left = api.put_metric, [signal.SIGTERM]

    def put_and_swallow(*args: Any) -> None:
        put_metric(*args)
        with suppress(Exception):
            os.kill(os.getpid(), left.pop())
            time.sleep(60)

    api.put_metric = put_and_swallow


FAULTS = {
    "restless": _never_rest,
    "early stop": _stop_while_ranks_start,
    "swallowed stop": _swallow_a_stop,
}

if "RANK" not in os.environ and "AGENT_FAULT" in os.environ:
    FAULTS[os.environ["AGENT_FAULT"]]()
