"""`shardwise train` under fire: ranks killed and stopped, and the launcher asked to end."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from chaos_ranks import (
    LONG,
    WORLD,
    Tally,
    config_of,
    end_state,
    events_of,
    newest_good,
    prepare,
    ranks_of,
    run_clean,
)

from commands import SHARDWISE, Command
from shardwise.errors import ExitCode

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RUNS, KILLS = (6, 5) if LONG else (1, 1)
STEPS = 20 + 10 * KILLS
SIGNALS = ["SIGTERM", "SIGUSR1", "SIGINT"] if LONG else ["SIGTERM"]
TIMEOUT_S = 300.0


class Training:
    """`shardwise train`: forked off, or as a user starts it."""

    def __init__(self, run_dir: Path, *, is_forked: bool = not LONG, **settings: Any) -> None:
        self.run_dir = run_dir
        config = run_dir.with_suffix(".json")
        settings = {"train__steps": STEPS, "checkpoint__every": 5, **settings}
        config.write_text(json.dumps(config_of(run_dir, **settings)), encoding="utf-8")
        self.output = run_dir.with_suffix(".txt")
        self.process: Command | subprocess.Popen[bytes]
        if is_forked:
            self.process = Command(["train", config], self.output)
        else:
            self.process = subprocess.Popen(
                [SHARDWISE, "train", config],
                stdout=self.output.open("a", encoding="utf-8"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that run now."""
        return ranks_of(self.process.pid)

    def steps(self) -> list[dict[str, Any]]:
        """The steps that were logged so far."""
        return events_of(self.run_dir, "step")

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Until `condition` holds; it must while the command runs."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def wait_beyond(self, step: int) -> None:
        """Until a later step than `step` is done."""
        self.wait_until(lambda: any(event["step"] > step for event in self.steps()))

    def wait_for_restarts(self, number: int) -> None:
        """Until the launcher has announced this many."""
        self.wait_until(lambda: len(events_of(self.run_dir, "restart")) >= number)

    def finish(self) -> int:
        """The exit code."""
        return self.process.wait(TIMEOUT_S)

    def said(self) -> str:
        """All that it printed."""
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def stop(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is not None:
            return
        for pid in [*self.ranks().values(), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Starts trainings of one run directory, and ends those that a test leaves."""
    started: list[Training] = []

    def start(**settings: Any) -> Training:
        started.append(Training(tmp_path / "run", **settings))
        return started[-1]

    yield start
    for training in started:
        training.stop()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The end of a run that nothing disturbs."""
    run_dir = tmp_path_factory.mktemp("clean") / "run"
    run_clean(prepare(run_dir, train__steps=STEPS, checkpoint__every=5))
    return end_state(run_dir, STEPS)


@pytest.mark.parametrize("seed", range(RUNS))
def test_killed_ranks_are_started_again(
    seed: int, train: Callable[..., Training], reference: str, tally: Tally
) -> None:
    chance = random.Random(seed)
    training = train(train__max_restarts=2 * KILLS)
    killed_at = []
    for _ in range(KILLS):
        done = max((event["step"] for event in training.steps()), default=0)
        training.wait_beyond(done + chance.randrange(6))
        os.kill(training.ranks()[chance.randrange(WORLD)], signal.SIGKILL)
        killed_at.append(time.time())
        training.wait_for_restarts(len(killed_at))
    assert training.finish() == 0, training.said()
    restarted_at = [event["time"] for event in events_of(training.run_dir, "restart")]
    again_at = [min(e["time"] for e in training.steps() if e["time"] > t) for t in restarted_at]
    waits = [again - killed for killed, again in zip(killed_at, again_at, strict=True)]
    tally.kills += KILLS
    tally.resumed += len(waits)
    tally.recovery_s += waits
    same = end_state(training.run_dir, STEPS) == reference
    tally.differences += not same
    assert same


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run whose rank 1 was stopped and never went on by itself."""
    training = Training(tmp_path_factory.mktemp("hung") / "run", train__hang_timeout_s=6)
    training.wait_beyond(7)
    os.kill(training.ranks()[1], signal.SIGSTOP)
    training.process.wait(TIMEOUT_S)
    yield training
    training.stop()


def test_hung_rank_is_named_and_started_again(hung: Training, reference: str) -> None:
    assert hung.finish() == 0, hung.said()
    reasons = [event["reason"] for event in events_of(hung.run_dir, "restart")]
    assert any("rank 1 hung" in reason for reason in reasons)
    assert "rank 1 hung" in hung.said()
    assert end_state(hung.run_dir, STEPS) == reference


def test_collective_that_hung_is_named(hung: Training) -> None:
    restarts = events_of(hung.run_dir, "restart")
    assert re.search(r"waited in \w+", f"{restarts} {hung.said()}"), hung.said()


@pytest.mark.parametrize("name", SIGNALS)
def test_asked_to_stop_saves_and_goes_on(
    name: str, train: Callable[..., Training], reference: str
) -> None:
    training = train()
    training.wait_beyond(7)
    training.process.send_signal(signal.Signals[name])
    assert training.finish() == ExitCode.PREEMPTED, training.said()
    (stopped,) = events_of(training.run_dir, "stopped")
    assert stopped["reason"] == name
    assert newest_good(training.run_dir) == stopped["step"] >= training.steps()[-1]["step"]
    assert train().finish() == 0
    assert [e["step"] for e in events_of(training.run_dir, "resume")] == [stopped["step"]]
    assert end_state(training.run_dir, STEPS) == reference


@pytest.mark.parametrize("name", SIGNALS if LONG else ["SIGINT"])
def test_asked_to_stop_before_the_first_step(name: str, train: Callable[..., Training]) -> None:
    """The ranks are still importing: there is nothing to save, and nothing to wait for."""
    training = train(is_forked=False, train__steps=4, cluster__name="1xCPU")
    training.wait_until(training.ranks)
    training.process.send_signal(signal.Signals[name])
    assert training.finish() == ExitCode.PREEMPTED, training.said()
    assert f"stopped by {name} before the first step; nothing was trained" in training.said()
    assert ("stopping: what was trained is saved first" in training.said()) == (name == "SIGINT")
    assert "Traceback" not in training.said()
    assert not training.ranks() and training.steps() == []


# Longer than the job below may hang.
SLOW_S = 7.0
SLOW_DISK = f"""
import os
if "RANK" in os.environ:
    import time
    from shardwise.checkpoint import durable_files
    sync, pauses = durable_files.sync_handle, [{SLOW_S}]
    def sync_slowly(handle):
        time.sleep(pauses.pop() if pauses else 0)
        sync(handle)
    durable_files.sync_handle = sync_slowly
"""


def test_stopped_before_its_first_step_then_suspended_then_saving_for_long_then_asked_to_stop(
    train: Callable[..., Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    training = train(train__steps=12, cluster__name="1xCPU", train__hang_timeout_s=5)
    training.wait_until(training.ranks)
    os.kill(training.ranks()[0], signal.SIGSTOP)
    training.wait_for_restarts(1)
    (restart,) = events_of(training.run_dir, "restart")
    assert restart["reason"] == "rank 0 hung: it was stopped for 5 s"
    # The whole job is suspended for longer than it may hang, and is none the worse for it.
    pids = [training.process.pid, *training.ranks().values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SLOW_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    training.wait_until(lambda: "finished 12 steps" in training.said())
    training.process.send_signal(signal.SIGTERM)
    assert training.finish() == 0, training.said()
    assert len(events_of(training.run_dir, "restart")) == 1
    # Stacks are for logs.
    assert "Fatal Python error" not in training.said()


def test_ranks_save_and_leave_when_the_launcher_is_killed(train: Callable[..., Training]) -> None:
    training = train()
    training.wait_beyond(7)
    ranks = training.ranks()
    training.process.kill()
    training.process.wait()
    deadline = time.monotonic() + TIMEOUT_S
    while any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
        assert time.monotonic() < deadline, "ranks without a launcher go on"
        time.sleep(0.05)
    (stopped,) = events_of(training.run_dir, "stopped")
    assert newest_good(training.run_dir) == stopped["step"]


BROKEN = """
import os
if "RANK" in os.environ:
    from shardwise.training import rank_run
    def build(*args, **settings):
        raise IndexError("index 1024 is out of bounds")
    rank_run.build_session = build
"""


def test_an_error_that_would_come_again_is_not_answered_by_a_restart(
    train: Callable[..., Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    training = train(cluster__name="1xCPU")
    assert training.finish() == ExitCode.WORKER_DIED
    said = training.said()
    assert "rank 0 failed: IndexError: index 1024 is out of bounds" in said
    assert "not started again, because the same error would come again" in said
    assert "ALERT" not in said
    assert events_of(training.run_dir, "restart") == []
