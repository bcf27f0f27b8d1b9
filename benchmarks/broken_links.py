"""Faults between two nodes, and how long the doctor takes to name them.

    python benchmarks/broken_links.py

Two network namespaces are the nodes, two ranks on each train with HSDP, and a shaped link joins
them. A link at a tenth of its speed, a cut link and a dead node are made in turn; the doctor looks
at the run every few seconds. Needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from namespaces import (
    CLUSTER,
    DEVICE,
    NODES,
    RANKS_PER_NODE,
    call,
    shape,
    start_rank,
    two_nodes,
    why_not_here,
)

SHARDWISE = Path(sys.executable).with_name("shardwise")
# Mbit/s, as the configuration has it. With more, ranks on a busy machine would be the slower part.
SPEED = 250
CONFIG = f"""\
name: run
model: small-llama
data: {{source: synthetic, seq_len: 32}}
cluster: {{name: {CLUSTER}, interconnect: {SPEED / 8e3}}}
shard: {{strategy: hybrid_shard}}
mesh: {{replicate: {NODES}, shard: {RANKS_PER_NODE}}}
train: {{steps: 100000, global_batch: 4, compare_replicas_every: 0, check_loss: false}}
checkpoint: {{every: 0}}
observe: {{log_every: 1}}
"""
START_S, PATIENCE_S, QUIET_S = 1200, 120, 20
Ranks = Sequence[subprocess.Popen[bytes]]
Nodes = tuple[str, str]


@dataclass(frozen=True)
class Fault:
    """What is done to the nodes after some steps, and the checks that should name it."""

    name: str
    speed: int
    act: Callable[[Nodes, Ranks], None]
    checks: frozenset[str]


def nothing(nodes: Nodes, ranks: Ranks) -> None:
    """The link was slow from the start."""


def cut(nodes: Nodes, ranks: Ranks) -> None:
    """No packet passes, and nobody is told."""
    call("ip", "-n", nodes[0], "link", "set", DEVICE, "down")


def kill_node(nodes: Nodes, ranks: Ranks) -> None:
    """All processes of the second node end at once."""
    for rank in ranks[RANKS_PER_NODE:]:
        rank.kill()


FAULTS = (
    Fault("no fault", SPEED, nothing, frozenset()),
    Fault("a tenth of the speed", SPEED // 10, nothing, frozenset({"SW403"})),
    Fault("a cut link", SPEED, cut, frozenset({"SW322", "SW570"})),
    Fault("a dead node", SPEED, kill_node, frozenset({"SW322", "SW570"})),
)


def main() -> None:
    if (reason := why_not_here()) is not None:
        print(f"not measured: {reason}")
        return
    for fault in FAULTS:
        seconds, said = seconds_to_name(fault)
        print(f"{fault.name:24}{seconds:6.0f} s   {said}")


def seconds_to_name(fault: Fault) -> tuple[float, str]:
    """Seconds from the fault to the doctor's finding, and what it says."""
    with tempfile.TemporaryDirectory() as scratch, two_nodes() as nodes:
        folder = Path(scratch)
        (folder / "run.yaml").write_text(CONFIG)
        shape(nodes, fault.speed)
        command = [str(SHARDWISE), "train", str(folder / "run.yaml"), f"runs_dir={folder}"]
        with started(nodes, command, folder) as ranks:
            wait_for_steps(folder / "run", 3, ranks)
            fault.act(nodes, ranks)
            began = time.monotonic()
            while time.monotonic() - began < (PATIENCE_S if fault.checks else QUIET_S):
                for finding in ask_doctor(folder / "run"):
                    assert fault.checks, f"without a fault: {finding}"
                    if finding["id"] in fault.checks:
                        said = f"{finding['id']} {finding['title']}: {finding['evidence']}"
                        return time.monotonic() - began, said
                time.sleep(2)
    return time.monotonic() - began, "nothing is named"


@contextmanager
def started(nodes: Nodes, command: Sequence[str], folder: Path) -> Iterator[Ranks]:
    """All ranks while the block runs."""
    ranks = [start_rank(nodes, rank, command, folder) for rank in range(NODES * RANKS_PER_NODE)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def wait_for_steps(run: Path, count: int, ranks: Ranks) -> None:
    """Until the record has so many steps."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        record = run / "events.jsonl"
        if record.exists() and record.read_text().count('"event": "step"') >= count:
            return
        assert all(rank.poll() is None for rank in ranks), "a rank ended before the fault"
        time.sleep(0.5)
    raise TimeoutError(f"no {count} steps within {START_S} s")


def ask_doctor(run: Path) -> list[dict[str, str]]:
    """What `shardwise doctor RUN` finds."""
    command = [str(SHARDWISE), "doctor", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    findings: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return findings


if __name__ == "__main__":
    main()
