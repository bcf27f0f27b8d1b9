"""DiLoCo and HSDP over the same slow link, in one run: tokens a second, and bytes at the interface.

    python benchmarks/diloco.py [--ranks 2] [--speed 100] [--delay 20] [--every 50]
        [--outer-steps 2]

Two network namespaces play two sites (namespaces.py), with so many ranks of `shardwise train` each.
HSDP shards inside a site and reduces gradients over the link in every step. DiLoCo has the same
mesh in each site, and exchanges over the link every so many steps. Bytes are counted at the
interface of the first site, and beside them stands what the plan says. Needs Linux, root, `ip` and
`tc`.

Each rank wants a core of its own. Where ranks share cores they gather parameters so slowly inside a
site that this, and not the link, says how fast DiLoCo is.

Rate and delay of the link are measured first (`shardwise fabric --between sites`). The delay is
made by a process that carries packets (delayed_link.py), which takes a part of a core; without a
delay (`--delay 0`) the kernel carries them. A model whose step is short beside its exchange is what
DiLoCo is for, so sequences are short.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from namespaces import (
    ADDRESSES,
    NODES,
    RANKS_PER_NODE,
    run_ranks,
    sent_bytes,
    shape,
    two_distant_nodes,
    two_nodes,
    why_not_here,
)
from shardwise.facts.collective_cost import TCP_SHARE
from shardwise.plan.planned import Plan

COMMAND = [sys.executable, "-m", "shardwise"]
CONFIG = """
model:
  name: small-llama
  overrides: {{hidden_size: {hidden}, intermediate_size: {inner}, num_attention_heads: 8,
    num_key_value_heads: 8, num_hidden_layers: {layers}}}
data: {{source: synthetic, seq_len: 16}}
cluster: {{name: {cluster}}}
train: {{micro_batch: 1, check_loss: false}}
checkpoint: {{every: 0, at_end: false}}
observe: {{log_every: {log_every}, collectives: false}}
"""


@dataclass(frozen=True, slots=True)
class Way:
    """A run, and what it gave."""

    name: str
    tokens_per_s: float
    """Of all ranks."""

    sent_bytes: int
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=RANKS_PER_NODE, help="of each site")
    parser.add_argument("--speed", type=int, default=100, help="Mbit/s")
    parser.add_argument("--delay", type=float, default=20.0, help="milliseconds one way")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--every", type=int, default=50, help="steps between outer steps")
    parser.add_argument("--outer-steps", type=int, default=2)
    parser.add_argument("--hsdp-steps", type=int, default=6)
    parser.add_argument("--exchange", default="fp32", choices=("fp32", "int8"))
    options = parser.parse_args()
    if (reason := why_not_here()) is not None:
        sys.exit(f"cannot be measured here: {reason}")
    signal.signal(signal.SIGTERM, leave)
    steps = options.every * options.outer_steps
    sites = ["mesh.site=2", f"diloco.steps={options.every}", f"train.steps={steps}"]
    sites += [f"diloco.exchange={options.exchange}"]
    if options.ranks > 1:
        sites += ["shard.strategy=full_shard"]
    with tempfile.TemporaryDirectory() as name, linked(options.speed, options.delay) as nodes:
        folder = Path(name)
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(f"link of {options.speed} Mbit/s and {options.delay:g} ms: {measured_link(nodes)}")
        print("\n| way | tok/s, all ranks | steps | MB sent by the first site |")
        print("|---|---|---|---|", flush=True)
        write(folder / "hsdp.yaml", options, log_every=1)
        write(folder / "sites.yaml", options, log_every=options.every)
        hsdp = ["shard.strategy=hybrid_shard", f"train.steps={options.hsdp_steps}"]
        hsdp += [f"mesh.replicate={NODES}", f"mesh.shard={options.ranks}"]
        runs = Runs(nodes, folder, options.ranks)
        slow = runs.train("hsdp", hsdp)
        fast = runs.train("sites", sites)
        plan = Plan.load(folder / "sites" / "plan.json")
        # The same steps with the last exchange alone.
        once = [*sites, f"diloco.steps={steps}"]
        idle = runs.train("sites", once, label="apart")
    show(slow, fast, idle, plan, options.outer_steps)


@contextmanager
def linked(speed: int, delay_ms: float) -> Iterator[tuple[str, str]]:
    """Two nodes, whose link the kernel carries where it has no delay."""
    if delay_ms:
        with two_distant_nodes(speed, delay_ms) as nodes:
            yield nodes
        return
    with two_nodes() as nodes:
        shape(nodes, speed)
        yield nodes


def write(file: Path, options: argparse.Namespace, log_every: int) -> None:
    """The run's YAML."""
    hidden, cluster = options.hidden, f"{NODES}x{options.ranks}xCPU"
    sizes = {"layers": options.layers, "hidden": hidden, "inner": 3 * hidden}
    file.write_text(CONFIG.format(**sizes, cluster=cluster, log_every=log_every))


def measured_link(nodes: Sequence[str]) -> str:
    """What `shardwise fabric --between sites` says of it."""
    inside = [
        ("ip", "netns", "exec", node, *COMMAND, "fabric", "--between", "sites") for node in nodes
    ]
    place = f"{ADDRESSES[1]}:29555"
    listener = subprocess.Popen([*inside[1], "--listen", place], stderr=subprocess.PIPE, text=True)
    assert listener.stderr is not None
    listener.stderr.readline()
    asked = [*inside[0], "--meet", place]
    said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    listener.wait()
    return said.splitlines()[0]


@dataclass(frozen=True, slots=True)
class Runs:
    """Trains in two sites, and counts what the first sends."""

    nodes: Sequence[str]
    folder: Path
    ranks: int
    """Of each site."""

    def train(self, name: str, words: Sequence[str], label: str | None = None) -> Way:
        """One run, and what it gave."""
        label, folder = label or name, self.folder
        command = [*COMMAND, "train", str(folder / f"{name}.yaml"), f"name={label}"]
        before = sent_bytes(self.nodes[0])
        command += [f"runs_dir={folder}", *words]
        codes = run_ranks(self.nodes, command, folder, self.ranks)
        if any(codes):
            bad = next(rank for rank, code in enumerate(codes) if code)
            sys.exit(f"{label}: rank {bad} failed\n{(folder / f'rank-{bad}.err').read_text()}")
        lines = (folder / label / "events.jsonl").read_text().splitlines()
        logged = [event for event in map(json.loads, lines) if event["event"] == "step"]
        # The first line is of the first step, which also sets up connections.
        rates = [event["tokens_per_s"] for event in logged[1:]]
        sent = sent_bytes(self.nodes[0]) - before
        speed = NODES * self.ranks * statistics.median(rates)
        way = Way(label, speed, sent, logged[-1]["step"])
        # Each takes a minute or more, so its row comes when it is known.
        row = f"| {way.name} | {way.tokens_per_s:.1f} | {way.steps} | {way.sent_bytes / 1e6:.2f} |"
        print(row, flush=True)
        return way


def show(slow: Way, fast: Way, idle: Way, plan: Plan, outer_steps: int) -> None:
    """The ratio, and the bytes beside the formula."""
    print(f"\nDiLoCo over HSDP: {fast.tokens_per_s / slow.tokens_per_s:.1f} x")
    assert plan.outlook is not None
    expected = plan.outlook.bytes_per_rank * plan.decided.replicate * plan.decided.shard
    # Meeting, deciding and ending send as much in both, so the difference is that of exchanges.
    counted = (fast.sent_bytes - idle.sent_bytes) / (outer_steps - 1)
    framed = expected / TCP_SHARE
    print(
        f"one exchange: {counted / 1e6:.3f} MB counted, {expected / 1e6:.3f} MB by the formula "
        f"({counted / expected - 1:+.1%}), {framed / 1e6:.3f} MB with the headers of TCP "
        f"({counted / framed - 1:+.1%})"
    )


def leave(number: int, frame: FrameType | None) -> None:
    """A stopped benchmark still ends its ranks, and takes its namespaces away."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
