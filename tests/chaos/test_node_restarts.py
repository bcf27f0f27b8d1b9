"""Two agents of `shardwise torchrun` as two nodes: ranks start again on both, a node comes and
goes, and an error that would come again is told alike on both."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_ranks import end_state, events_of, ranks_of
from launched import TIMEOUT_S, Started, free_port
from slow_steps import SlowSteps

from commands import SHARDWISE

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 10
CONFIG = """\
model:
  name: tiny-llama
  overrides: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
    num_key_value_heads: 2, vocab_size: 257}
data: {source: synthetic, seq_len: 16}
cluster: 2x1xCPU
shard: {strategy: full_shard}
train: {steps: 10, global_batch: 4, check_loss: false}
checkpoint: {every: 1, keep: 2, asynchronous: false}
observe: {log_every: 1}
"""
# An error of one rank that another start would meet again.
BROKEN = """
import os
if os.environ.get("GROUP_RANK") == "1":
    from shardwise.training import loop

    tell = loop.tell_step

    def tell_and_fail(*args):
        tell(*args)
        if os.path.exists(os.environ["HOLD"]):
            raise IndexError("no such sample")

    loop.tell_step = tell_and_fail
"""


class Nodes:
    """Agents that meet at one port, and the run that they train."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "runs" / "run"
        self.steps = SlowSteps(folder, seconds=1)
        self._port = free_port()
        (folder / "run.yaml").write_text(CONFIG)

    def start(self, number: int, nodes: str, *words: str, **environ: str) -> Started:
        timing = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,is_host=" + (
            "true" if number == 0 else "false"
        )
        options = (f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=7")
        meeting = (f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={timing}")
        run = (str(self.folder / "run.yaml"), f"runs_dir={self.folder / 'runs'}", *words)
        own = {**self.steps.environ, **environ}
        output = self.folder / f"node-{number}-{len(list(self.folder.glob('node-*')))}.txt"
        return Started((SHARDWISE, "torchrun", *options, *meeting, *run), output, own)

    def wait(self, is_so: Callable[[], bool], *agents: Started) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            said = "\n".join(agent.text for agent in agents)
            assert time.monotonic() < deadline, said
            assert all(agent.process.poll() is None for agent in agents), said
            time.sleep(0.1)

    def has_steps(self, count: int) -> bool:
        return len(events_of(self.run_dir, "step")) >= count

    def plain(self) -> Path:
        """The same run in one go, on one node."""
        words = ("name=plain", "cluster.name=2xCPU", f"runs_dir={self.folder / 'runs'}")
        command = (SHARDWISE, "train", str(self.folder / "run.yaml"), *words)
        own = Started(command, self.folder / "plain.txt")
        assert own.end() == 0, own.text
        return self.folder / "runs" / "plain"


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_ranks_of_both_nodes_start_again_after_one_was_killed(nodes: Nodes) -> None:
    nodes.steps.hold()
    agents = [nodes.start(number, "2") for number in (0, 1)]
    nodes.wait(lambda: nodes.has_steps(2), *agents)
    os.kill(*ranks_of(agents[1].process.pid).values(), signal.SIGKILL)
    nodes.wait(lambda: (nodes.run_dir / "logs" / "attempt-2").exists(), *agents)
    nodes.steps.release()
    said = "\n".join(agent.text for agent in agents)
    assert [agent.end() for agent in agents] == [0, 0], said
    assert "starting the ranks again (1 of 3)" in said and "(2 of 3)" not in said
    assert "killed by signal SIGKILL" in said and "error:" not in said
    assert end_state(nodes.run_dir, STEPS) == end_state(nodes.plain(), STEPS)


def test_an_error_that_would_come_again_is_that_of_both_nodes(nodes: Nodes) -> None:
    place = nodes.folder / "broken"
    place.mkdir()
    (place / "sitecustomize.py").write_text(BROKEN)
    nodes.steps.hold()
    path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    agents = [nodes.start(number, "2", PYTHONPATH=path) for number in (0, 1)]
    codes = [agent.end() for agent in agents]
    assert codes == [6, 6], [agent.text for agent in agents]
    for agent in agents:
        assert agent.text.count("error:") == 1, agent.text
        assert "IndexError: no such sample" in agent.text, agent.text
        assert "starting the ranks again" not in agent.text, agent.text


@pytest.mark.long
def test_a_node_comes_and_goes_and_the_batches_stay_the_same(nodes: Nodes) -> None:
    """`--nnodes 1:2`: one node begins, another joins and dies, and the first ends alone."""
    words = ("launch.elastic=true",)
    nodes.steps.hold()
    first = nodes.start(0, "1:2", *words)
    nodes.wait(lambda: nodes.has_steps(1), first)
    second = nodes.start(1, "1:2", *words)
    joined = nodes.run_dir / "logs" / "attempt-2" / "rank-1.log"
    nodes.wait(joined.exists, first, second)
    before = len(events_of(nodes.run_dir, "step"))
    nodes.wait(lambda: nodes.has_steps(before + 1), first, second)
    for pid in (second.process.pid, *ranks_of(second.process.pid).values()):
        os.kill(pid, signal.SIGKILL)
    second.end()
    nodes.wait(lambda: (nodes.run_dir / "logs" / "attempt-3").exists(), first)
    nodes.steps.release()
    assert first.end() == 0, first.text
    worlds = [
        len(list((nodes.run_dir / "logs" / f"attempt-{number}").glob("rank-*.log")))
        for number in (1, 2, 3)
    ]
    assert worlds == [1, 2, 1], first.text
    # Another number of ranks adds up in another order.
    assert losses(nodes.run_dir) == pytest.approx(losses(nodes.plain()), rel=1e-5)


def losses(run_dir: Path) -> dict[int, float]:
    """By step, as the last start has made it."""
    return {one["step"]: one["loss"] for one in events_of(run_dir, "step")}
