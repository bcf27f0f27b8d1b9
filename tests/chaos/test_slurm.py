"""Runs on a real Slurm of two nodes on this machine, submitted and watched by the real command.

In `make test` each node has one rank, and the processes that Slurm starts are forked off
(stand_in.py). In `make chaos` each has two, so that the mesh is HSDP's, and they are the installed
command.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from chaos_ranks import LONG, end_state, events_of
from slow_steps import SlowSteps
from slurm_cluster import NODES, NoSlurm, SlurmCluster, install
from stand_in import StandIn

from commands import rank_environment, run_installed

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 24
# Of a node.
RANKS = 2 if LONG else 1
TIMEOUT_S = 300.0
CONFIG = """\
model:
  name: tiny-llama
  overrides: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
    num_key_value_heads: 2, vocab_size: 257}
data: {source: synthetic, seq_len: 16}
cluster: CLUSTER
shard: {strategy: STRATEGY}
train: {steps: 24, global_batch: 8, check_loss: false}
checkpoint: {every: 0, asynchronous: false}
observe: {log_every: 1}
launch: {walltime_s: 3600, grace_s: 150}
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Both nodes idle. Where there can be no Slurm, the tests are skipped with the reason."""
    try:
        install()
        found = started_in(tmp_path_factory)
    except NoSlurm as reason:
        # pytest shows warnings, and reasons of skips only where it is asked to.
        warnings.warn(f"no Slurm here: {reason}", stacklevel=1)
        pytest.skip(f"no Slurm here: {reason}")
    yield found
    found.stop()


def started_in(folders: pytest.TempPathFactory, tries: int = 3) -> SlurmCluster:
    """A cluster that has come up. A port that was free may be another's a moment later."""
    found = SlurmCluster(folders.mktemp("slurm"))
    try:
        found.start()
    except NoSlurm:
        found.stop()
        if tries == 1:
            raise
        return started_in(folders, tries - 1)
    return found


@pytest.fixture(scope="module")
def command() -> Iterator[str]:
    """What Slurm starts on the nodes."""
    if LONG:
        yield str(Path(sys.executable).with_name("shardwise"))
        return
    with StandIn() as stand_in:
        yield str(stand_in.path)


class Site:
    """A user's directory, the cluster, and the command as the user types it."""

    def __init__(self, folder: Path, cluster: SlurmCluster, command: str, shardwise: Run) -> None:
        self.folder, self.cluster, self._shardwise = folder, cluster, shardwise
        self._start = [f"runs_dir={folder / 'runs'}", f"launch.command={command}"]
        strategy = "hybrid_shard" if RANKS > 1 else "full_shard"
        config = CONFIG.replace("CLUSTER", f"2x{RANKS}xCPU").replace("STRATEGY", strategy)
        (folder / "run.yaml").write_text(config)
        self.steps = SlowSteps(folder, seconds=4)
        self.environ = rank_environment() | cluster.environ | self.steps.environ

    def shardwise(self, *words: str) -> str:
        run = run_installed if LONG else self._shardwise
        return run(*words, environ=self.environ).stdout

    def launch(self, name: str, *words: str) -> str:
        """Submit it; the number of the job."""
        config = str(self.folder / "run.yaml")
        given = (*self._start, f"name={name}", *words)
        said = self.shardwise("launch", config, "--on", "slurm", "--submit", *given)
        found = re.search(r"submitted: slurm job (\d+);", said)
        assert found is not None, said
        return found[1]

    def run_dir(self, name: str) -> Path:
        return self.folder / "runs" / name

    def output(self, name: str) -> str:
        files = sorted(self.run_dir(name).glob("launch/slurm-*.out"))
        return "".join(file.read_text(errors="replace") for file in files)

    def status(self, name: str) -> dict[str, object]:
        return dict(json.loads(self.shardwise("status", str(self.run_dir(name)), "--json")))

    def wait_for(self, name: str, words: str, times: int = 1) -> None:
        """Until the job has printed these words so often."""
        self.wait(name, lambda: self.output(name).count(words) >= times, words)

    def wait_for_state(self, name: str, job: str, state: str) -> None:
        def is_there() -> bool:
            words = ("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")
            return self.cluster.client(*words).strip() == state

        self.wait(name, is_there, state)

    def limit(self, name: str, job: str, minutes: int) -> None:
        """Change the time limit of a job, as an administrator may."""
        words = ("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
        self.wait(name, lambda: self.cluster.client(*words) == "", " ".join(words))

    def wait(self, name: str, is_over: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_over():
            shown = f"no {what!r}:\n{self.output(name)}\n{self.cluster.daemon_words()}"
            assert time.monotonic() < deadline and "Traceback" not in self.output(name), shown
            # A client of Slurm takes longer to start than a look at a file.
            time.sleep(0.5)


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, cluster: SlurmCluster, command: str, shardwise: Run
) -> Site:
    return Site(tmp_path_factory.mktemp("site"), cluster, command, shardwise)


@pytest.fixture(autouse=True)
def mended(cluster: SlurmCluster) -> Iterator[None]:
    """One failed test does not take the nodes from the next."""
    yield
    cluster.mend()


@pytest.fixture(scope="module")
def uninterrupted(site: Site) -> Path:
    """The same mesh without Slurm and without a stop."""
    words = (
        "torchrun",
        "--standalone",
        "--nproc-per-node",
        f"{2 * RANKS}",
        str(site.folder / "run.yaml"),
    )
    site.shardwise(*words, f"runs_dir={site.folder / 'runs'}", "name=uninterrupted")
    return site.run_dir("uninterrupted")


def losses(run_dir: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events_of(run_dir, "step")}


def test_a_run_is_told_before_its_time_limit_and_ends_as_if_it_had_not_been(
    site: Site, uninterrupted: Path
) -> None:
    site.steps.hold()
    job = site.launch("limited")
    site.wait_for("limited", "step  3/24")
    found = site.status("limited")
    assert found["state"] == "running" and found["nodes"] == list(NODES)
    assert found["num_steps"] == STEPS and int(str(found["step"])) >= 3
    # The controller looks at time limits every half minute. This one is within the grace period of
    # 150 s, and so the job is told when it looks next.
    shown = site.cluster.client("squeue", "-h", "-j", job, "-o", "%M")
    minutes = int(shown.strip().split(":")[-2])
    site.limit("limited", job, minutes + 3)
    site.wait_for("limited", "the job starts again and resumes")
    site.steps.release()
    site.limit("limited", job, 60)
    site.wait_for_state("limited", job, "COMPLETED")
    said = site.output("limited")
    assert "error: stopped by SIGUSR2; step " in said and "resumed at step " in said
    assert f"mesh replicate={RANKS} x shard=2" in " ".join(said.split())
    assert f"finished {STEPS} steps" in said
    assert end_state(site.run_dir("limited"), STEPS) == end_state(uninterrupted, STEPS)
    assert losses(site.run_dir("limited")) == losses(uninterrupted)
    assert site.status("limited")["state"] == "ended"
    # The logs of all ranks are one.
    merged = site.shardwise("logs", str(site.run_dir("limited")), "--lines", "1000")
    starts = re.findall(r"\[(\d) (\w+)\] \S+ rank \d of \d on", merged)
    assert sorted(rank for rank, _ in starts) == [str(rank) for rank in range(2 * RANKS)]
    assert sorted(node for _, node in starts) == sorted(RANKS * NODES)


@pytest.mark.long
def test_a_lost_and_drained_node_is_left_out_and_a_cancelled_job_saves(
    site: Site, uninterrupted: Path
) -> None:
    """The run ends on one node, having trained the same global batches."""
    site.steps.hold()
    job = site.launch("fewer", "launch.elastic=true", "checkpoint.every=1")
    site.wait_for("fewer", "saved step ")
    client = site.cluster.client
    client("scontrol", "update", f"NodeName={NODES[1]}", "State=DRAIN", "Reason=test")
    site.cluster.kill_node(NODES[1])
    site.wait_for("fewer", f"on 1x{RANKS}xCPU: ")
    site.wait_for("fewer", "saved step ", times=site.output("fewer").count("saved step ") + 1)
    assert site.status("fewer")["nodes"] == [NODES[0]]
    client("scancel", job)
    site.wait_for_state("fewer", job, "CANCELLED")
    site.wait_for("fewer", "; step ")
    stopped = events_of(site.run_dir("fewer"), "stopped")[-1]
    assert f"stopped by {stopped['reason']}; step {stopped['step']} is saved" in site.output(
        "fewer"
    )
    # Slurm starts it again where it sees first that the node has gone, and the script otherwise.
    was_script = os.path.exists(site.run_dir("fewer") / "launch" / f"failures-{job}")
    assert site.output("fewer").count("the job starts again") == int(was_script)
    # The same command goes on, with the node that is left.
    site.steps.release()
    again = site.launch("fewer", "launch.elastic=true", "checkpoint.every=0")
    site.wait_for_state("fewer", again, "COMPLETED")
    found = events_of(site.run_dir("fewer"), "start")
    assert [event["world_size"] for event in found] == [2 * RANKS, RANKS, RANKS]
    assert found[-1]["step"] == stopped["step"]
    trained = losses(site.run_dir("fewer"))
    assert trained.keys() == losses(uninterrupted).keys()
    assert trained == pytest.approx(losses(uninterrupted), abs=1e-5)


@pytest.mark.long
def test_a_killed_rank_is_started_again_within_the_job(site: Site, uninterrupted: Path) -> None:
    site.steps.hold()
    job = site.launch("killed", "checkpoint.every=1")
    site.wait_for("killed", "saved step ")
    os.kill(rank_of_run(site.run_dir("killed"), 2 * RANKS - 1), signal.SIGKILL)
    site.wait_for("killed", "starting the ranks again (1 of 3)")
    site.wait_for("killed", "resumed at step ")
    site.steps.release()
    site.wait_for_state("killed", job, "COMPLETED")
    assert "the job starts again" not in site.output("killed")
    assert end_state(site.run_dir("killed"), STEPS) == end_state(uninterrupted, STEPS)


def rank_of_run(run_dir: Path, rank: int) -> int:
    """The process of a rank, which Slurm has started somewhere on this machine."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes()
            environ = (entry / "environ").read_bytes().split(b"\0")
            if f"{run_dir}/".encode() in words and f"RANK={rank}".encode() in environ:
                return int(entry.name)
    raise AssertionError(f"no process is rank {rank} of {run_dir}")


@pytest.mark.long
def test_a_killed_slurmd_does_not_end_a_run_and_stop_saves_for_good(site: Site) -> None:
    site.steps.hold()
    job = site.launch("lasting")
    site.wait_for("lasting", "step  2/24")
    site.cluster.kill_daemon(NODES[1])
    site.wait_for("lasting", "step  3/24")
    site.cluster.start_node(NODES[1])
    site.wait_for("lasting", "step  4/24")
    assert "asked to stop: RUNNING" in site.shardwise("stop", str(site.run_dir("lasting")))
    site.wait_for_state("lasting", job, "COMPLETED")
    site.steps.release()
    stopped = events_of(site.run_dir("lasting"), "stopped")
    assert [event["reason"] for event in stopped] == ["SIGUSR2"]
    assert "the job starts again" not in site.output("lasting")
    assert site.status("lasting")["record"] == "stopped by SIGUSR2, and saved"
