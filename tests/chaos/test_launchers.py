"""The real command as one rank of torchrun, of srun and of our own agent: errors and exit codes."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from actions import lives
from chaos_ranks import ranks_of
from launched import TIMEOUT_S, TORCHRUN, Started, free_port

from commands import SHARDWISE

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CONFIG = """\
model: tiny-llama
data: {source: text, path: TEXT, seq_len: 32}
cluster: 2xCPU
train: {steps: 4000, global_batch: 4}
checkpoint: {every: 0}
observe: {log_every: 1}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("Two nodes train one model. " * 400)
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.replace("TEXT", str(tmp_path / "text.txt")))
    return str(file)


def test_torchrun_shows_a_ranks_error_once_with_its_log(config: str, tmp_path: Path) -> None:
    words = ("-m", "shardwise", "train", config, f"runs_dir={tmp_path}")
    # More text than there is, which only the ranks find out.
    too_long = ("data.seq_len=100000", "model.overrides.max_position_embeddings=200000")
    launcher = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
    run = Started((*launcher, *words, *too_long), tmp_path / "output")
    # torchrun's own code: its agent knows no other.
    assert run.end() == 1, run.text
    assert run.text.count("which is not one full sequence") == 1, run.text
    assert run.text.count("error: rank ") == 1
    assert f"on {socket.gethostname()} failed: " in run.text
    assert f"log: {tmp_path}/run/logs/attempt-1/rank-" in run.text
    assert "is shown above" in run.text


def test_our_agent_starts_ranks_again_passes_a_signal_on_and_ends_as_they_do(
    config: str, tmp_path: Path
) -> None:
    words = ("torchrun", "--standalone", "--nproc-per-node", "2", config, f"runs_dir={tmp_path}")
    settings = ("train.hang_timeout_s=6", "checkpoint.every=1")
    agent = Started((SHARDWISE, *words, *settings), tmp_path / "output")
    agent.wait_for("saved step 1")
    os.kill(ranks_of(agent.process.pid)[1], signal.SIGSTOP)
    agent.wait_for("; starting the ranks again (1 of 3)")
    assert "ALERT: rank 1 hung: " in agent.text
    agent.wait_for("resumed at step")
    agent.wait_for("\nstep ", after="resumed at step")
    # torchrun would die of this one; SIGTERM takes the same way.
    agent.process.send_signal(signal.SIGUSR1)
    assert agent.end() == 75, agent.text
    assert agent.text.count("error:") == 1 and "Traceback" not in agent.text
    assert "error: stopped by SIGUSR1; step " in agent.text
    assert f"log: {tmp_path}/run/logs/attempt-2/rank-" in agent.text
    assert list(tmp_path.glob("run/checkpoints/step-*/manifest.json"))


def test_our_agent_ends_where_no_rank_has_begun(config: str, tmp_path: Path) -> None:
    """The other node never comes; a signal must not wait for it."""
    port = free_port()
    where = ("--nnodes", "2", "--node-rank", "0", "--master-port", str(port))
    words = (SHARDWISE, "torchrun", *where, config)
    agent = Started(words, tmp_path / "output", is_forked=False)
    # It listens once it waits for the other.
    deadline = time.monotonic() + TIMEOUT_S
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert time.monotonic() < deadline and agent.process.poll() is None, agent.text
        time.sleep(0.1)
    agent.process.send_signal(signal.SIGINT)
    assert agent.end() == -signal.SIGINT, agent.text
    assert "Traceback" not in agent.text


def idle_agent(output: Path, fault: str = "") -> Started:
    """Our agent with two ranks that do nothing, and a fault of its own."""
    words = ("--standalone", "--nproc-per-node", "2", "-m", "idle_rank")
    own = {"PYTHONPATH": str(Path(__file__).with_name("agents"))}
    own |= {"AGENT_FAULT": fault} if fault else {}
    return Started((SHARDWISE, "torchrun", *words), output, own)


def test_our_agents_exit_code_is_not_lost_while_its_rendezvous_works(tmp_path: Path) -> None:
    agent = idle_agent(tmp_path / "output", fault="restless")
    agent.wait_for("rank 0 idles")
    agent.process.send_signal(signal.SIGTERM)
    assert agent.end() == 75, agent.text
    assert "terminate called" not in agent.text


def test_our_agent_leaves_no_rank_that_a_request_to_stop_has_passed_by(tmp_path: Path) -> None:
    agent = idle_agent(tmp_path / "output", fault="early stop")
    assert agent.end() == 75, agent.text
    ranks = [int(line.split()[1]) for line in agent.text.splitlines() if line[:7] == "started"]
    assert len(ranks) == 2
    # A killed rank takes a moment to end; one that was left would idle on.
    deadline = time.monotonic() + TIMEOUT_S
    while left := list(filter(lives, ranks)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_our_agent_ends_by_a_signal_whose_exception_was_swallowed(tmp_path: Path) -> None:
    agent = idle_agent(tmp_path / "output", fault="swallowed stop")
    assert agent.end() == 75, agent.text


def test_our_agent_does_not_wait_for_a_rank_that_waits_for_a_dead_one(tmp_path: Path) -> None:
    """The one has died of the request, the other has noted it; neither has made a step."""
    agent = idle_agent(tmp_path / "output")
    for rank in (0, 1):
        agent.wait_for(f"rank {rank} idles")
    agent.process.send_signal(signal.SIGTERM)
    # The time to save is twice as long as this waits.
    assert agent.end() == 75, agent.text


def test_srun_has_the_exit_codes_of_its_tasks(config: str, tmp_path: Path) -> None:
    step = {
        "SLURM_JOB_ID": f"{os.getpid()}{time.time_ns()}",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TMPDIR": str(tmp_path),
    }
    command = (SHARDWISE, "train", config, f"runs_dir={tmp_path}")

    def start(task: str) -> Started:
        own = {"SLURM_PROCID": task, "SLURM_LOCALID": task}
        return Started(command, tmp_path / f"output-{task}", step | own)

    tasks = [start("0"), start("1")]
    tasks[0].wait_for("step    2/4000")
    tasks[1].process.send_signal(signal.SIGTERM)
    assert [task.end() for task in tasks] == [75, 75], [task.text for task in tasks]
    assert sum(task.text.count("error: stopped by") for task in tasks) == 1
    assert not any("Traceback" in task.text for task in tasks)
