"""SIGKILL at every point of a save and at random moments: the run goes on, to the same last bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_ranks import (
    LONG,
    STEPS,
    WORLD,
    Fault,
    Job,
    Tally,
    calls_of,
    end_state,
    events_of,
    logs,
    newest_good,
    prepare,
    run_clean,
)

from shardwise.checkpoint.store import list_entries

pytestmark = pytest.mark.dist

SAVES = range(2, STEPS + 1, 2)
SHORT_SWEEP_KILLS = 4
RANDOM_RUNS = 12
RANDOM_KILLS = 4
RANDOM_STEPS = 24


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs."""
    plan_path = prepare(tmp_path_factory.mktemp("clean") / "run")
    run_clean(plan_path)
    return plan_path.parent


def test_same_end_however_saved(clean_run: Path, tmp_path: Path) -> None:
    plan_path = prepare(tmp_path / "run", checkpoint__asynchronous=False)
    run_clean(plan_path)
    assert end_state(tmp_path / "run") == end_state(clean_run)


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.long)])
def test_kill_at_points_of_a_save(
    asynchronous: bool, clean_run: Path, tmp_path: Path, tally: Tally
) -> None:
    """Each run is killed once in each of its saves, and ends as if nothing had been."""
    points = points_of(clean_run, seed=int(asynchronous))
    for first in range(0, len(points), len(SAVES)):
        life = Life(
            prepare(tmp_path / f"run-{first}", checkpoint__asynchronous=asynchronous), tally
        )
        for step, (rank, call, after, everyone) in zip(SAVES, points[first:], strict=False):
            # The first save has no older one to remove: its last call stands for that.
            number = min(call, len(calls_of(clean_run, rank, step)))
            life.start(lambda job: job.finish(), Fault(rank, step, number, after, everyone))
        life.end(end_state(clean_run))


@pytest.fixture(scope="module")
def clean_longer_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs, with time enough for chance to strike."""
    plan_path = prepare(tmp_path_factory.mktemp("clean") / "run", train__steps=RANDOM_STEPS)
    run_clean(plan_path)
    return plan_path.parent


@pytest.mark.long
@pytest.mark.parametrize("seed", range(RANDOM_RUNS))
def test_kill_at_random_moments(
    seed: int, clean_longer_run: Path, tmp_path: Path, tally: Tally
) -> None:
    chance = random.Random(seed)
    begun, ended = (event["time"] for event in events_of(clean_longer_run, "start", "end"))
    run_dir = tmp_path / "run"
    plan_path = prepare(run_dir, train__steps=RANDOM_STEPS, checkpoint__asynchronous=seed % 2 == 0)
    life = Life(plan_path, tally, RANDOM_STEPS)

    def kill_in_time(job: Job) -> list[int]:
        starts = len(events_of(run_dir, "start"))
        while len(events_of(run_dir, "start")) == starts:
            assert all(p.exitcode is None for p in job.processes), logs(run_dir)
            time.sleep(0.01)
        time.sleep(chance.uniform(0, (ended - begun) / 2))
        job.kill(chance.choice(([0], [1], [0, 1])))
        return job.finish()

    for _ in range(RANDOM_KILLS):
        if newest_good(run_dir) < RANDOM_STEPS:
            life.start(kill_in_time)
    life.end(end_state(clean_longer_run, RANDOM_STEPS))


class Life:
    """A run that is started until it has ended; after each kill its next start is checked."""

    def __init__(self, plan_path: Path, tally: Tally, steps: int = STEPS) -> None:
        self.plan_path = plan_path
        self.run_dir = plan_path.parent
        self.tally = tally
        self.steps = steps
        self.killed = False

    def start(self, see: Callable[[Job], list[int]], fault: Fault | None = None) -> None:
        """Start the ranks; they are killed under `see`, unless they were quicker."""
        newest, before = self._newest(), len(events_of(self.run_dir, "start", "resume"))
        codes = see(Job(self.plan_path, fault))
        entries = events_of(self.run_dir, "start", "resume")[before:]
        if newest < self.steps:
            assert [e["step"] for e in entries] == ([newest, newest] if newest else [0])
        self.tally.resumed += self.killed
        self.killed = -9 in codes
        self.tally.kills += self.killed
        assert self.killed or fault is None, f"{fault} was not met"

    def end(self, reference: str) -> None:
        """Start without faults; the end must be bit for bit that of `reference`."""
        self.start(lambda job: job.finish())
        assert newest_good(self.run_dir) == self.steps, logs(self.run_dir)
        same = end_state(self.run_dir, self.steps) == reference
        self.tally.differences += not same
        assert same

    def _newest(self) -> int:
        """What the run must go on from: no older than what it said was saved, and nothing torn."""
        entries = list_entries(self.run_dir / "checkpoints")
        assert not [entry for entry in entries if entry.state in ("damaged", "quarantined")]
        newest = newest_good(self.run_dir)
        assert newest >= max((e["step"] for e in events_of(self.run_dir, "checkpoint")), default=0)
        return newest


def points_of(clean_run: Path, seed: int) -> list[tuple[int, int, bool, bool]]:
    """(rank, call, after, everyone): each write once, all four ways around each sync and rename."""
    writes, edges = [], []
    for rank in range(WORLD):
        for call, name in enumerate(calls_of(clean_run, rank, SAVES[1]), 1):
            if name == "write":
                writes.append((rank, call, False, call % 2 == 0))
            else:
                edges += [(rank, call, a, e) for a in (False, True) for e in (False, True)]
    chance = random.Random(seed)
    if LONG:
        points = writes + edges
        chance.shuffle(points)
        return points
    few = SHORT_SWEEP_KILLS // 3
    return chance.sample(edges, SHORT_SWEEP_KILLS - few) + chance.sample(writes, few)
