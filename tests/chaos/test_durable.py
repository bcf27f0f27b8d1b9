"""Kills, stops, suspends and bad disks at random, under every launcher, until a run has ended.

Whatever befalls a run: nobody writes after another job has, no start goes back behind a checkpoint
that was published, what was announced can be loaded, and the end is that of a run in peace, to the
last bit.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import actions
import pytest
from actions import ACTIONS, MOMENTS, Action, Job, Moment, send
from chaos_ranks import config_of, end_state, events_of

import forked
from forkserver import forkserver
from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.store import list_entries

pytestmark = pytest.mark.dist

DISTURBANCES = 500
STEPS, SHORT_STEPS = 150, 24
EVERY, KEEP = 6, 3
# Longer than the hang timeout.
SUSPENDED_S, HANG_S = 4.0, 3.0
# A job that has not ended or gone on by then does so no more.
PATIENCE_S = 90.0


def _bad_disk(job: Job, chance: random.Random) -> None:
    """Full, or failing, for some saves; then it works again."""
    switch = job.output.parent / "bad_disk"
    switch.write_text(str(chance.choice([errno.ENOSPC, errno.EIO])))
    time.sleep(2 * chance.random())
    switch.unlink()


def _start_a_rival(job: Job, chance: random.Random) -> None:
    """The same command once more, while the first one runs."""


def _kill_orphan(job: Job, chance: random.Random) -> None:
    """A rank that has lost its launcher, while it saves or leaves."""
    ranks = list(job.ranks().values())
    send(job.launcher, signal.SIGKILL)
    time.sleep(0.5 * chance.random())
    if ranks:
        send(chance.choice(ranks), signal.SIGKILL)


RIVAL = Action("rival", _start_a_rival, ends=False)
OWN = (
    Action("bad disk", _bad_disk, ends=False),
    Action("kill orphan", _kill_orphan),
    RIVAL,
)


@dataclass(frozen=True, slots=True)
class ForkedJob(Job):
    """Its ranks were forked, so that the kernel does not know their variables."""

    process: Any = None

    def ranks(self) -> dict[int, int]:
        """Process ids of the launcher's children, in the order in which they were started."""
        children = Path(f"/proc/{self.launcher}/task/{self.launcher}/children")
        if not self.alive():
            return {}
        try:
            return dict(enumerate(map(int, children.read_text().split())))
        except OSError:
            return {}


@dataclass(slots=True)
class Tally:
    """What all disturbances came to."""

    disturbances: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    starts: int = 0
    refused: int = 0
    published: int = 0
    stuck: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(f"{number} {name}" for name, number in self.disturbances.most_common())
        return (
            f"{self.disturbances.total()} disturbances ({kinds}) of {self.lives} runs: "
            f"{self.starts} starts, {self.refused} refused, {self.published} checkpoints "
            f"published, {self.stuck} jobs that only a kill ended"
        )


class Life:
    """A run that is disturbed until its last step is saved."""

    def __init__(self, folder: Path, kind: str, chance: random.Random, tally: Tally, steps: int):
        self.folder, self.run_dir = folder, folder / "run"
        self.kind, self.chance, self.tally, self.steps = kind, chance, tally, steps
        self.jobs: list[ForkedJob] = []
        folder.mkdir(parents=True)
        self.config = folder / "run.json"
        self.config.write_text(json.dumps(config_of(self.run_dir, **settings(steps))))
        tally.lives += 1

    @property
    def is_over(self) -> bool:
        """Whether the last step is saved."""
        return any(entry.step == self.steps and entry.checkpoint for entry in self._entries())

    def start(self) -> ForkedJob:
        """One more start of the command."""
        name = f"writer-{len(self.jobs)}"
        output = self.folder / f"{name}.txt"
        output.touch()
        words = ("train", str(self.config))
        process = forkserver().Process(
            target=forked.launch, args=(self.kind, words, output, name, self.folder)
        )
        process.start()
        assert process.pid is not None
        self.jobs.append(ForkedJob(process.pid, output, process))
        self.tally.starts += 1
        return self.jobs[-1]

    def disturb(self, moment: Moment, action: Action) -> None:
        """Wait for the moment in the life of the newest job, and let the action befall it."""
        job = next((job for job in reversed(self.jobs) if job.alive()), None) or self.start()
        moment.wait(job, self.chance)
        if not job.alive():
            self.judge()
            return
        self.tally.disturbances[action.name] += 1
        ranks = list(job.ranks().values())
        action.act(job, self.chance)
        if action is RIVAL or (action.ends and self.chance.random() < 0.5):
            # Whoever is still there keeps it out, or is waited for.
            self.start()
        elif action.ends:
            self._await_end(job, ranks)
        self.judge()

    def finish(self) -> None:
        """In peace from here on."""
        for job in self.jobs:
            self._await_end(job, [])
        while not self.is_over:
            job = self.start()
            self._await_end(job, [])
            self.judge()
        self.judge()
        self.tally.refused += sum("is in use by" in job.said() for job in self.jobs)
        self.tally.published += sum(" published " in line for line in self._trail())

    def _await_end(self, job: ForkedJob, ranks: list[int]) -> None:
        """Until the job has ended; who gets stuck is killed, and counted."""
        deadline = time.monotonic() + PATIENCE_S
        said = ""
        while job.alive() and time.monotonic() < deadline:
            if job.said() != said:
                said, deadline = job.said(), time.monotonic() + PATIENCE_S
            job.process.join(0.05)
        if job.alive():
            self.tally.stuck += 1
            for pid in [job.launcher, *ranks, *job.ranks().values()]:
                send(pid, signal.SIGKILL)
        job.process.join()

    def end(self) -> None:
        """Leave nobody."""
        for job in self.jobs:
            if job.alive():
                for pid in [*job.ranks().values(), job.launcher]:
                    send(pid, signal.SIGKILL)
            job.process.join()

    # ---- what must hold at any moment --------------------------------------------------------

    def judge(self) -> None:
        lines = self._trail()
        turns = [(who, list(turn)) for who, turn in groupby(lines, lambda line: line.split()[0])]
        seen: set[str] = set()
        for who, turn in turns:
            # torchrun starts its ranks again after another job has held the run: that is a start
            # like any other.
            assert who not in seen or _is_start(turn), f"two writers: {who} wrote {turn[:3]} again"
            seen.add(who)
        newest = 0
        published: set[int] = set()
        for line in lines:
            _, what, *more = line.split()
            if what == "published":
                step = int(more[0])
                assert step not in published, f"step {step} was published twice"
                published.add(step)
                newest = step
            elif more[0] in ("start", "resume"):
                assert int(more[1]) >= newest, f"{line} after step {newest} was published"
        if self.kind != "torchrun":  # whose own agent prints them
            for job in self.jobs:
                assert "Traceback" not in job.said(), job.said()
        self._judge_checkpoints()

    def _judge_checkpoints(self) -> None:
        """Announced ones are there, but for those that newer ones have replaced, and whole.

        Only at rest: whoever trains on replaces some while they are read.
        """
        announced = {event["step"] for event in events_of(self.run_dir, "checkpoint")}
        if not self._is_at_rest() or not announced:
            return
        entries = self._entries()
        whole = {entry.step: entry.path for entry in entries if entry.checkpoint}
        assert not [entry for entry in entries if entry.state in ("damaged", "quarantined")]
        newer = sorted(announced | whole.keys())[-KEEP:]
        assert set(newer) <= whole.keys(), f"{newer} were announced, {sorted(whole)} are there"
        for path in whole.values():
            assert check_checkpoint(path) == []

    def _is_at_rest(self) -> bool:
        """Whether no job is left, nor any process that has a file of this life open: a killed
        launcher leaves ranks that save once more, and no list has those that it started last."""
        if any(job.alive() for job in self.jobs):
            return False
        others = set(filter(str.isdecimal, os.listdir("/proc"))) - {str(os.getpid())}
        return not any(self._has_open(Path(f"/proc/{pid}/fd")) for pid in others)

    def _has_open(self, files: Path) -> bool:
        """Whether a process has a file of this life open. Some end while they are asked."""
        with suppress(OSError):
            for name in os.listdir(files):
                with suppress(OSError):
                    if (files / name).readlink().is_relative_to(self.folder):
                        return True
        return False

    def _entries(self) -> list[Any]:
        return list_entries(self.run_dir / "checkpoints")

    def _trail(self) -> list[str]:
        """Whole lines only."""
        trail = self.folder / "trail"
        text = trail.read_text(encoding="utf-8") if trail.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()


def _is_start(turn: list[str]) -> bool:
    """Whether these lines begin as those of a start do."""
    return turn[0].split(maxsplit=1)[1].startswith(("event data", "event resume", "event start"))


def settings(steps: int) -> dict[str, Any]:
    return {
        **{"train__steps": steps, "checkpoint__every": EVERY, "checkpoint__keep": KEEP},
        **{"train__hang_timeout_s": HANG_S, "train__max_restarts": 3},
        **{"checkpoint__wait_for_room_s": 1, "model__name": "tiny-llama"},
    }


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The end of a run that nothing disturbs, by its number of steps."""
    known: dict[int, str] = {}

    def end_of(steps: int) -> str:
        if steps not in known:
            folder = tmp_path_factory.mktemp("peace") / "life"
            life = Life(folder, "shardwise", random.Random(0), Tally(), steps)
            life.finish()
            assert len(life.jobs) == 1, life.jobs[0].said()
            known[steps] = end_state(life.run_dir, steps)
        return known[steps]

    yield end_of


@pytest.fixture(autouse=True)
def brief_suspends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "SUSPENDED_S", SUSPENDED_S)


def named(name: str) -> Action:
    return next(action for action in (*ACTIONS, *OWN) if action.name == name)


def test_a_run_that_is_disturbed_ends_as_one_in_peace(peaceful: Any, tmp_path: Path) -> None:
    """One life of the long form."""
    tally = Tally()
    life = Life(tmp_path / "life", "shardwise", random.Random(0), tally, SHORT_STEPS)
    _, _, trains, saves = MOMENTS
    try:
        for moment, name in [(trains, "kill rank"), (saves, "rival"), (saves, "kill launcher")]:
            if not life.is_over:
                life.disturb(moment, named(name))
        life.finish()
    finally:
        life.end()
    assert end_state(life.run_dir, SHORT_STEPS) == peaceful(SHORT_STEPS)


@pytest.mark.long
def test_five_hundred_disturbances(peaceful: Any, tmp_path: Path) -> None:
    chance, tally = random.Random(int(os.environ.get("SHARDWISE_SEED", "0"))), Tally()
    wanted = int(os.environ.get("SHARDWISE_DISTURBANCES", DISTURBANCES))
    reference = peaceful(STEPS)
    kinds = list(forked.LAUNCHERS)
    began = time.monotonic()
    while tally.disturbances.total() < wanted:
        kind = kinds[tally.lives % len(kinds)]
        life = Life(tmp_path / f"life-{tally.lives}", kind, chance, tally, STEPS)
        try:
            while not life.is_over and tally.disturbances.total() < wanted:
                life.disturb(chance.choice(MOMENTS), chance.choice((*ACTIONS, *OWN)))
            life.finish()
            assert end_state(life.run_dir, STEPS) == reference
        finally:
            life.end()
        print(f"{time.monotonic() - began:.0f} s, {kind}: {tally}", flush=True)
