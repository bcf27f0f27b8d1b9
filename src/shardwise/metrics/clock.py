"""Time one piece of work while every rank does it, because devices of one machine share power
and cores."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.parallel.mesh import World

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long each measurement loads the device, and in how many rounds."""

    load_s: float
    rounds: int


# A GPU slows down to its power limit within tenths of a second of full load.
THOROUGH = {"cuda": Patience(1.2, 3), "cpu": Patience(0.6, 5)}
QUICK = {"cuda": Patience(0.1, 1), "cpu": Patience(0.05, 1)}


@dataclass(frozen=True, slots=True)
class Round:
    """Several calls in a row on every rank."""

    calls: int
    begun: tuple[float, ...]
    """Times by rank, on the clock that ranks of one machine share."""

    ended: tuple[float, ...]

    @property
    def seconds(self) -> list[float]:
        """The seconds of one call, by rank."""
        return [
            (ended - begun) / self.calls
            for begun, ended in zip(self.begun, self.ended, strict=True)
        ]


class Clock:
    """Measures on this rank's device, together with the other ranks."""

    def __init__(self, device: torch.device, patience: Patience, world: World) -> None:
        self.device = device
        self.patience = patience
        self.world = world
        self._wall_s = 0.0
        self._cpu_s = 0.0

    def seconds(self, work: Work) -> float:
        """The seconds of one call on the slowest rank, which all others wait for in training."""
        self._round(work, 1)
        count = self._calls_of_a_round(self._round(work, 2))
        rounds = [max(self._round(work, count).seconds) for _ in range(self.patience.rounds)]
        return statistics.median(rounds)

    def one_round(self, work: Work) -> Round:
        """One round of work that has been done once already.

        Work that takes long enough is not done again: over a slow link there is no time for it.
        """
        once = self._round(work, 1)
        count = self._calls_of_a_round(once)
        return once if count == 1 else self._round(work, count)

    def cpu_share(self) -> float:
        """The share of the CPU that the ranks got so far, of what they could have had together.

        Ranks wait in collectives, so this is meaningful before the first collective only.
        """
        used = torch.tensor([self._cpu_s], dtype=torch.float64)
        dist.all_reduce(used, group=self.world.group)
        threads = self.world.size * torch.get_num_threads()
        return float(used) / (self._wall_s * min(threads, os.cpu_count() or 1))

    def _calls_of_a_round(self, tried: Round) -> int:
        """The number of calls in a round, the same on all ranks, so that all of them are loaded
        to the end."""
        load_s = self.patience.load_s / self.patience.rounds
        return max(1, math.ceil(load_s / max(tried.seconds)))

    def _round(self, work: Work, count: int) -> Round:
        self.wait()
        dist.barrier(group=self.world.group)
        started, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            work()
        self.wait()
        ended = time.perf_counter()
        self._cpu_s += time.process_time() - cpu_s
        self._wall_s += ended - started
        everywhere = torch.empty(2 * self.world.size, dtype=torch.float64)
        mine = torch.tensor([started, ended], dtype=torch.float64)
        dist.all_gather_into_tensor(everywhere, mine, group=self.world.group)
        moments = everywhere.tolist()
        return Round(count, tuple(moments[::2]), tuple(moments[1::2]))

    def wait(self) -> None:
        """Wait until the device has done all work that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
