"""Rank processes that outlive a test: one process group runs every function that it is handed."""

from __future__ import annotations

import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from forkserver import forkserver
from shardwise.launch.rank_environment import RENDEZVOUS_VARIABLE
from shardwise.launch.worker import join_process_group
from shardwise.parallel import mesh

JOB_TIMEOUT_S = 180.0


class Ranks:
    """`world` processes in one gloo group, each with one thread."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on every rank at once; returns their results by rank.

        `function` is found by its module and name. Where one rank fails its traceback is raised
        here, and the next call starts new processes.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        try:
            return self._collect(time.monotonic() + JOB_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = forkserver()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world, self._folder.name)
            )
            process.daemon = True
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.world:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.world)) - set(results))
                raise AssertionError(f"ranks {missing} of {self.world} did not answer in time")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                error, results[rank] = _receive(self._pipes[rank])
                if error:
                    raise AssertionError(f"rank {rank} of {self.world} failed:\n{error}")
        return [results[rank] for rank in range(self.world)]


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        answer: tuple[str, Any] = pipe.recv()
    except EOFError:
        return "its process died", None
    return answer


def _serve(pipe: Connection, rank: int, world: int, folder: str) -> None:
    """The life of one rank: join, then answer until the parent is gone."""
    os.environ |= {
        RENDEZVOUS_VARIABLE: f"file://{folder}/rendezvous",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    torch.set_num_threads(1)
    join_process_group("cpu")
    _make_each_group_once()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("", function(*args))
        except BaseException:  # noqa: BLE001 - whatever it is, the test shows it
            pipe.send((traceback.format_exc(), None))
            return
        pipe.send(answer)
        gc.collect()
        # The libraries stay; collections need not look at them again.
        gc.freeze()


def _make_each_group_once() -> None:
    """Let all tests of a pool share meshes of one shape.

    A group stays for the life of its process, and a thread of each group wakes up a hundred times a
    second: idle ranks with 70 groups took half of two cores.
    """
    mesh.init_device_mesh = cache(mesh.init_device_mesh)  # type: ignore[assignment]
    mesh._make_group = cache(mesh._make_group)
    mesh.World.beside = cache(mesh.World.beside)  # type: ignore[assignment, method-assign]
