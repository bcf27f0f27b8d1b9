"""Two trainers that start, die, stop and go on in one run directory, and what they leave."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Protocol

from shardwise.checkpoint.store import list_checkpoints

PATIENCE_S = 300.0
MOST_ROUNDS = 20
FAULTS = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]


class Trainer(Protocol):
    """One start of the command."""

    name: str

    def pids(self) -> list[int]:
        """The launcher, if it lives, and its ranks."""

    def alive(self) -> bool:
        """Whether the launcher or a rank of it lives."""

    def said(self) -> str:
        """All that it printed."""


@dataclass(slots=True)
class Sum:
    """What all interleavings came to."""

    interleavings: int = 0
    starts: int = 0
    refused: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    handovers: int = 0
    announced: int = 0
    two_writers: int = 0
    """How often a job wrote after another one had."""

    longest_return: int = 0
    """The most lines that such a job wrote."""

    lost: int = 0

    def __str__(self) -> str:
        faults = ", ".join(f"{number} {name}" for name, number in sorted(self.faults.items()))
        return (
            f"{self.interleavings} interleavings: {self.starts} starts, {self.refused} refused, "
            f"{faults}; {self.handovers} handovers, {self.announced} checkpoints announced, "
            f"{self.lost} lost, {self.two_writers} times two writers"
        )


class Stage:
    """One run directory, and the trainers that fight for it."""

    def __init__(
        self, run_dir: Path, seed: int, start: Callable[[str], Trainer], unit_s: float
    ) -> None:
        self.run_dir = run_dir
        self.chance = random.Random(seed)
        self.start = start
        self.unit_s = unit_s
        self.trainers: list[Trainer] = []
        self.stopped: set[int] = set()
        self.sum = Sum()

    def interleave(self) -> None:
        """Start, start a rival, let faults hit either, start once more; some live on."""
        chance = self.chance
        self.sum.interleavings += 1
        moves: list[Callable[[], None]] = [self._begin, self._begin]
        moves += [self._hurt] * chance.randint(1, 3)
        moves += [self._begin] * chance.randint(0, 1)
        chance.shuffle(moves)
        self._begin()
        if chance.random() < 0.5:
            self._wait_for_a_save()
        for move in moves:
            move()
            time.sleep(self.unit_s * chance.random())
        self._go_on()
        if chance.random() < 0.5:
            self.end()

    def play(self, times: int, keep: int, enough: Callable[[Sum], bool]) -> Sum:
        """So many interleavings, and as many again until enough has happened: how much comes to
        pass in one of them depends on the machine."""
        for _ in range(MOST_ROUNDS):
            for _ in range(times):
                self.interleave()
            # What is written while it is counted would look lost.
            self.end()
            total = self.judge(keep)
            print(total, flush=True)
            if enough(total):
                break
        return total

    def end(self) -> None:
        """Nobody is left, some killed and some asked."""
        self._go_on()
        number = self.chance.choice([signal.SIGKILL, signal.SIGTERM])
        deadline = time.monotonic() + 60
        while living := [trainer for trainer in self.trainers if trainer.alive()]:
            for pid in [pid for trainer in living for pid in trainer.pids()]:
                _send(pid, number if time.monotonic() < deadline else signal.SIGKILL)
            time.sleep(0.05)

    def judge(self, keep: int) -> Sum:
        """Count what must never be, by the trail and the console, without asking the lock.

        Nobody may be left that writes.
        """
        lines = [line.split() for line in _text(self.run_dir.with_suffix(".trail")).splitlines()]
        turns = [(name, len(list(group))) for name, group in groupby(line[0] for line in lines)]
        seen: set[str] = set()
        returns = [length for name, length in turns if name in seen or seen.add(name)]
        self.sum.two_writers, self.sum.longest_return = len(returns), max(returns, default=0)
        self.sum.handovers = len(seen) - 1
        published = [int(line[2]) for line in lines if line[1] == "published"]
        # A job that began anew or from an older checkpoint would publish a step again.
        self.sum.lost = len(published) - len(set(published))
        said = [trainer.said() for trainer in self.trainers]
        announced = {int(line.split()[2]) for text in said for line in _saved(text)}
        self.sum.announced = len(announced)
        self.sum.starts = len(said)
        self.sum.refused = sum("is in use by" in text for text in said)
        found = {checkpoint.step for checkpoint in list_checkpoints(self.run_dir / "checkpoints")}
        newest = sorted(announced | set(published))[-keep:]
        self.sum.lost += len(set(newest) - found) + len(announced - set(published))
        assert not [text for text in said if "Traceback" in text]
        return self.sum

    def _wait_for_a_save(self) -> None:
        """Some faults hit before the first step, and as many hit a job that trains and saves."""
        before, deadline = self._saves(), time.monotonic() + PATIENCE_S
        while self._saves() == before and self._is_anyone_there() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _is_anyone_there(self) -> bool:
        """Whether someone lives who may save."""
        return any(trainer.alive() for trainer in self.trainers)

    def _saves(self) -> int:
        return _text(self.run_dir.with_suffix(".trail")).count("published")

    def _begin(self) -> None:
        self.trainers.append(self.start(f"writer-{len(self.trainers)}"))

    def _hurt(self) -> None:
        """A fault for a launcher or a rank that lives."""
        pids = [pid for trainer in self.trainers for pid in trainer.pids()]
        if not pids:
            return
        pid, number = self.chance.choice(pids), self.chance.choice(FAULTS)
        self.sum.faults[number.name] += 1
        if number == signal.SIGSTOP:
            self.stopped.add(pid)
        _send(pid, number)
        if self.chance.random() < 0.5:
            time.sleep(self.unit_s * self.chance.random())
            self._go_on()

    def _go_on(self) -> None:
        for pid in self.stopped:
            _send(pid, signal.SIGCONT)
        self.stopped.clear()


def _saved(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("saved step ")]


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
