"""The commands of rendered manifests, run as Kubernetes would run them in two pods: they meet,
train, save when one is evicted, are started again by the job's own rules, resume and end."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from chaos_ranks import end_state, events_of
from launched import TIMEOUT_S, Started, free_port
from pods import pods_of, what_follows
from slow_steps import SlowSteps

from commands import run_installed

pytestmark = [pytest.mark.dist, pytest.mark.long]
STEPS = 12
CONFIG = """\
model:
  name: tiny-llama
  overrides: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
    num_key_value_heads: 2, vocab_size: 257}
data: {source: synthetic, seq_len: 16}
cluster: 2x1xCPU
shard: {strategy: full_shard}
train: {steps: 12, global_batch: 4, check_loss: false}
checkpoint: {every: 0, asynchronous: false}
observe: {log_every: 1}
"""
AGAIN = {"volcano": "RestartJob"}


def ended(pods: list[Started]) -> list[int]:
    return [pod.end() for pod in pods]


def wait_for_steps(run_dir: Path, count: int, pods: list[Started]) -> None:
    """All pods write one record; which of them has rank 0 is for the agents to say."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(events_of(run_dir, "step")) < count:
        said = "\n".join(pod.text for pod in pods)
        assert time.monotonic() < deadline, said
        assert all(pod.process.poll() is None for pod in pods), said
        time.sleep(0.1)


class Site:
    """A shared volume, and the files of a job that was launched."""

    def __init__(self, folder: Path, on: str, *words: str) -> None:
        shared = folder / "shared"
        self._on, self._folder, self._config = on, folder, folder / "first.yaml"
        self._config.write_text(CONFIG)
        given = ("kubernetes.image=shardwise", "kubernetes.claim=training", "kubernetes.queue=gpus")
        place = (f"kubernetes.mount={shared}", f"runs_dir={shared / 'runs'}")
        run_installed("launch", str(self._config), "--on", on, *given, *place, *words)
        self.run_dir = shared / "runs" / "first"
        self.files = self.run_dir / "launch"
        self.steps = SlowSteps(folder, seconds=4)

    def start(self, attempt: int, count: int | None = None) -> list[Started]:
        """The pods of one start, or the first of them."""
        pods = pods_of(self._on, self.files, self._folder / "mounts", attempt)
        folder = self._folder / f"start-{attempt}"
        return pods.start(free_port(), folder, self.steps.environ, count)

    def alone(self) -> Path:
        """The same run in one go on one node."""
        place = f"runs_dir={self._folder / 'alone'}"
        run_installed("train", str(self._config), place, "cluster=2xCPU")
        return self._folder / "alone" / "first"


@pytest.mark.parametrize("on", ["jobset", "trainjob", "volcano"])
def test_two_pods_train_save_resume_and_end(on: str, tmp_path: Path) -> None:
    site = Site(tmp_path, on)
    run_dir, files, start = site.run_dir, site.files, site.start
    site.steps.hold()
    first = start(0)
    wait_for_steps(run_dir, 1, first)
    # Kubernetes evicts one of them.
    first[1].process.send_signal(signal.SIGTERM)
    assert ended(first) == [75, 75], "\n".join(pod.text for pod in first)
    site.steps.release()
    (stopped,) = events_of(run_dir, "stopped")
    assert stopped["reason"] == "SIGTERM" and stopped["step"] < STEPS
    # The job's own rules start all pods again, and would not after a wrong setting.
    assert what_follows(on, files, 75) == AGAIN.get(on, "RestartJobSetAndIgnoreMaxRestarts")
    assert what_follows(on, files, 2) in ("FailJobSet", "TerminateJob")
    assert what_follows(on, files, 1) in ("RestartJobSet", "RestartJob")
    second = start(1)
    assert ended(second) == [0, 0], "\n".join(pod.text for pod in second)
    assert any(f"resumed at step {stopped['step']}" in pod.text for pod in second)
    assert [one["step"] for one in events_of(run_dir, "step")] == list(range(1, STEPS + 1))
    assert end_state(run_dir, STEPS) == end_state(site.alone(), STEPS)


@pytest.mark.parametrize("on", ["jobset", "volcano"])
def test_an_elastic_job_goes_on_with_the_pod_that_gets_a_node(on: str, tmp_path: Path) -> None:
    """Two pods train, one is evicted and gets no other node; the run ends on one, having trained
    the same batches."""
    site = Site(tmp_path, on, "launch.elastic=true")
    site.steps.hold()
    first = site.start(0)
    wait_for_steps(site.run_dir, 1, first)
    first[1].process.send_signal(signal.SIGTERM)
    assert ended(first) == [75, 75], "\n".join(pod.text for pod in first)
    site.steps.release()
    (last,) = site.start(1, count=1)
    assert ended([last]) == [0], last.text
    starts = events_of(site.run_dir, "start")
    assert [one["world_size"] for one in starts] == [2, 1]
    assert starts[1]["step"] == events_of(site.run_dir, "stopped")[0]["step"]
    losses = {one["step"]: one["loss"] for one in events_of(site.run_dir, "step")}
    alone = events_of(site.alone(), "step")
    assert losses == pytest.approx({one["step"]: one["loss"] for one in alone}, abs=1e-5)
