"""Jobs that are killed, stopped, suspended and asked to stop at any moment of their lives: none of
their processes lives on for long, and a job that was only suspended goes on as if nothing was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from actions import ACTIONS, MOMENTS, Action, Job, Process, send
from chaos_ranks import config_of, end_state, events_of, newest_good, prepare, ranks_of, run_clean

from commands import SHARDWISE, rank_environment
from shardwise.checkpoint.store import list_checkpoints
from shardwise.errors import ExitCode

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.long]

ROUNDS = int(os.environ.get("SHARDWISE_CHAOS_ROUNDS", "60"))
HANG_S = 6.0
# From the moment on that nothing holds a process up: a hang is noticed, asked, aborted, killed.
ENDS_WITHIN_S = 600.0
# So that a start makes steps and saves before the next fault, and none of them is the last.
STEPS = 10**6
ABORTED = "terminate called without an active exception"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHERS = {
    "shardwise": (SHARDWISE,),
    "shardwise torchrun": (SHARDWISE, "torchrun", "--standalone", "--nproc-per-node", "2"),
    "torchrun": (sys.executable, *TORCHRUN, "-m", "shardwise"),
}


class Life:
    """One run directory, and the jobs that are started on it one after the other."""

    def __init__(self, folder: Path, launcher: str, **settings: Any) -> None:
        self.run_dir = folder / "run"
        self._config = folder / "run.json"
        given = {"train__steps": STEPS, "checkpoint__every": 5, "checkpoint__keep": 3, **settings}
        config = config_of(self.run_dir, train__hang_timeout_s=HANG_S, **given)
        self._config.write_text(json.dumps(config), encoding="utf-8")
        verb = () if launcher == "shardwise torchrun" else ("train",)
        self._command = (*LAUNCHERS[launcher], *verb, str(self._config))
        self._starts = 0
        self.known: set[Process] = set()

    def start(self, *changes: str) -> tuple[Job, subprocess.Popen[bytes]]:
        """One more job."""
        self._starts += 1
        output = self.run_dir.with_name(f"output-{self._starts}")
        process = subprocess.Popen(
            [*self._command, *changes],
            stdout=output.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=rank_environment(),
        )
        self.known.add(Process.of(process.pid))
        return Job(process.pid, output), process

    def note(self, job: Job) -> None:
        """Remember its processes, which may become orphans."""
        self.known |= set(map(Process.of, job.ranks().values()))

    def living(self) -> list[Process]:
        """Processes of any start that have not ended."""
        return [process for process in self.known if process.alive()]

    def announced(self) -> list[int]:
        """Steps whose save was printed, in any start."""
        texts = [path.read_text(errors="replace") for path in self.run_dir.parent.glob("output-*")]
        lines = [line.split() for text in texts for line in text.splitlines()]
        return sorted(int(line[2]) for line in lines if line[:2] == ["saved", "step"])


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    """Makes lives, and ends what a test leaves of them."""
    lives: list[Life] = []

    def make(launcher: str, **settings: Any) -> Life:
        lives.append(Life(tmp_path, launcher, **settings))
        return lives[-1]

    yield make
    for life in lives:
        for process in life.living():
            process.send(signal.SIGKILL)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_any_action_at_any_moment(launcher: str, live: Callable[..., Life], tmp_path: Path) -> None:
    life, chance = live(launcher), random.Random(len(launcher))
    counts: Counter[str] = Counter()
    for number in range(ROUNDS):
        moment, action = chance.choice(MOMENTS), chance.choice(ACTIONS)
        counts[action.name] += 1
        saved = newest_good(life.run_dir)
        job, process = life.start()
        moment.wait(job, chance)
        life.note(job)
        action.act(job, chance)
        life.note(job)
        print(f"{launcher} {number}: {action.name}, {moment.name}, step {saved}", flush=True)
        if not action.ends:
            _assert_goes_on(life, job, process)
        _end(life, job, process, action, launcher)
        for start in events_of(life.run_dir, "start"):
            assert start["step"] > 0 or not life.announced() or _is_first(life, start), start
        newest = [one.step for one in list_checkpoints(life.run_dir / "checkpoints")]
        # What was announced last is there, or a later one is.
        assert not life.announced() or newest[-1] >= life.announced()[-1]
    print(f"{launcher}: {dict(sorted(counts.items()))}")
    _assert_like_an_undisturbed_run(life, tmp_path)


def _is_first(life: Life, start: dict[str, Any]) -> bool:
    """Whether it began before any save was there."""
    saves = [event["time"] for event in events_of(life.run_dir, "checkpoint")]
    return not saves or start["time"] < min(saves)


def _assert_goes_on(life: Life, job: Job, process: subprocess.Popen[bytes]) -> None:
    """A suspended job makes further steps, and was not taken to hang."""
    before, deadline = job.said().count("\nstep "), time.monotonic() + ENDS_WITHIN_S
    while job.said().count("\nstep ") <= before and process.poll() is None:
        assert time.monotonic() < deadline, job.said()
        time.sleep(0.05)
    assert "hung" not in job.said(), job.said()
    assert process.poll() is None, job.said()
    life.note(job)


def _end(
    life: Life, job: Job, process: subprocess.Popen[bytes], action: Action, launcher: str
) -> None:
    """Nothing of the job is left after a while, and it ends with a code that says how."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    if action.name in ("kill rank", "stop rank"):
        # It is started again, or ends, or had no rank yet: then it is asked to.
        while process.poll() is None and "\nstep " not in _after_restart(job.said()):
            assert time.monotonic() < deadline, job.said()
            life.note(job)
            time.sleep(0.05)
    life.note(job)
    if job.alive():
        send(job.launcher, signal.SIGTERM)
    deadline = time.monotonic() + ENDS_WITHIN_S
    while life.living():
        assert time.monotonic() < deadline, (life.living(), job.said())
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    code = process.wait()
    # Python's own, of a launcher that imports; and torchrun's, of ranks that were killed.
    expected = ("KeyboardInterrupt", "torch.distributed.elastic")
    assert "Traceback" not in job.said() or any(word in job.said() for word in expected), job.said()
    known = {0, 1, ExitCode.PREEMPTED, ExitCode.WORKER_DIED, -signal.SIGKILL, -signal.SIGTERM}
    if launcher == "torchrun" and ABORTED in job.said():
        # PyTorch's own agent has a thread in its store while Python ends; ours ends at once.
        known.add(-signal.SIGABRT)
    assert code in known | {-signal.SIGINT, -signal.SIGUSR1, 130, ExitCode.ENVIRONMENT}, job.said()


def _after_restart(said: str) -> str:
    return said.partition("starting the ranks again")[2] or said


def _assert_like_an_undisturbed_run(life: Life, folder: Path) -> None:
    """The last start goes some steps further; then all bytes are those of a run in peace."""
    last = newest_good(life.run_dir) + 5
    job, process = life.start(f"train.stop_after={last}")
    assert process.wait(ENDS_WITHIN_S) == 0, job.said()
    peaceful = folder / "peaceful"
    settings = {"train__steps": STEPS, "train__stop_after": last, "checkpoint__every": 0}
    run_clean(prepare(peaceful, **settings))
    assert end_state(life.run_dir, last) == end_state(peaceful, last)


def test_orphans_of_a_killed_launcher_end_though_one_of_them_is_stopped(
    live: Callable[..., Life],
) -> None:
    life = live("shardwise")
    job, process = life.start()
    MOMENTS[2].wait(job, random.Random(0))
    ranks = ranks_of(job.launcher)
    life.note(job)
    send(ranks[1], signal.SIGSTOP)
    send(job.launcher, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + ENDS_WITHIN_S
    while life.living():
        assert time.monotonic() < deadline, life.living()
        time.sleep(0.1)


def test_under_torchrun_the_ranks_watch_each_other(live: Callable[..., Life]) -> None:
    life = live("torchrun")
    job, process = life.start()
    MOMENTS[2].wait(job, random.Random(0))
    life.note(job)
    send(ranks_of(job.launcher)[1], signal.SIGSTOP)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDS_WITHIN_S)
    assert process.returncode == 1, job.said()
    assert job.said().count("error: rank 1 hung: ") == 1, job.said()
    assert life.living() == []
