"""DiLoCo and HSDP over the same slow link, in one run: tokens a second, and bytes at the interface.

    python benchmarks/diloco.py [--speed 100] [--every 50] [--outer-steps 2]

Two network namespaces play two sites (namespaces.py), with two ranks of `shardwise train` each.
HSDP shards inside a site and reduces gradients over the link in every step. DiLoCo has the same
mesh in each site, and exchanges over the link every so many steps. Bytes are counted at the
interface of the first site, and beside them stands what the plan says. Needs Linux, root, `ip` and
`tc`.

The rate of the link is checked by a transfer first. The link has no delay: `netem` is not in every
kernel.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from namespaces import ADDRESSES, CLUSTER, run_ranks, sent_bytes, shape, two_nodes, why_not_here
from shardwise.facts.fabric import TCP_SHARE
from shardwise.plan.plan import Plan

COMMAND = [sys.executable, "-m", "shardwise"]
CONFIG = """
model:
  name: small-llama
  overrides: {{hidden_size: 256, intermediate_size: 768, num_attention_heads: 4,
    num_key_value_heads: 4, num_hidden_layers: {layers}}}
data: {{source: synthetic, seq_len: 64}}
cluster: {{name: {cluster}}}
train: {{micro_batch: 1, check_loss: false}}
checkpoint: {{every: 0, at_end: false}}
observe: {{log_every: {log_every}, collectives: false}}
"""
PROBE_BYTES = 4_000_000
_SEND = (
    "import socket, sys; s = socket.create_connection((sys.argv[1], 29555)); "
    "s.sendall(bytes(int(sys.argv[2]))); s.shutdown(1); s.recv(1)"
)
_RECEIVE = (
    "import socket, sys; l = socket.create_server((sys.argv[1], 29555)); c, _ = l.accept()\n"
    "while c.recv(1 << 16): pass\nc.close()"
)


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
    parser.add_argument("--speed", type=int, default=100, help="Mbit/s")
    parser.add_argument("--layers", type=int, default=5)
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
    sites += ["shard.strategy=full_shard", f"diloco.exchange={options.exchange}"]
    with tempfile.TemporaryDirectory() as name, two_nodes() as nodes:
        folder = Path(name)
        shape(nodes, options.speed)
        print(f"link: {measured_rate(nodes):.1f} Mbit/s by a transfer, {options.speed} asked for")
        write(folder / "hsdp.yaml", options.layers, log_every=1)
        write(folder / "sites.yaml", options.layers, log_every=options.every)
        hsdp = ["shard.strategy=hybrid_shard", f"train.steps={options.hsdp_steps}"]
        slow = run(nodes, folder, "hsdp", [*hsdp, "mesh.replicate=2", "mesh.shard=2"])
        fast = run(nodes, folder, "sites", sites)
        plan = Plan.load(folder / "sites" / "plan.json")
        # The same steps with the last exchange alone.
        once = [*sites, f"diloco.steps={steps}"]
        idle = run(nodes, folder, "sites", once, label="apart")
    show(slow, fast, idle, plan, options.outer_steps)


def write(file: Path, layers: int, log_every: int) -> None:
    """The run's YAML."""
    file.write_text(CONFIG.format(layers=layers, cluster=CLUSTER, log_every=log_every))


def measured_rate(nodes: Sequence[str]) -> float:
    """Mbit/s of a transfer from the first namespace to the second."""
    inside = [("ip", "netns", "exec", node, sys.executable, "-c") for node in nodes]
    listener = subprocess.Popen([*inside[1], _RECEIVE, ADDRESSES[1]])
    time.sleep(1.0)
    started = time.perf_counter()
    subprocess.run([*inside[0], _SEND, ADDRESSES[1], str(PROBE_BYTES)], check=True)
    seconds = time.perf_counter() - started
    listener.wait()
    return 8e-6 * PROBE_BYTES / seconds


def run(
    nodes: Sequence[str], folder: Path, name: str, words: Sequence[str], label: str | None = None
) -> Way:
    """Train, and count what the first site sends."""
    label = label or name
    command = [*COMMAND, "train", str(folder / f"{name}.yaml"), f"name={label}"]
    before = sent_bytes(nodes[0])
    codes = run_ranks(nodes, [*command, f"runs_dir={folder}", *words], folder)
    if any(codes):
        bad = next(rank for rank, code in enumerate(codes) if code)
        sys.exit(f"{label}: rank {bad} failed\n{(folder / f'rank-{bad}.err').read_text()}")
    lines = (folder / label / "events.jsonl").read_text().splitlines()
    logged = [event for event in map(json.loads, lines) if event["event"] == "step"]
    # The first line is of the first step, which also sets up connections.
    rates = [event["tokens_per_s"] for event in logged[1:]]
    sent = sent_bytes(nodes[0]) - before
    return Way(label, 4 * statistics.median(rates), sent, logged[-1]["step"])


def show(slow: Way, fast: Way, idle: Way, plan: Plan, outer_steps: int) -> None:
    """The table, the ratio, and the bytes beside the formula."""
    print("\n| way | tok/s, all ranks | steps | MB sent by the first site |")
    print("|---|---|---|---|")
    for way in (slow, fast, idle):
        print(f"| {way.name} | {way.tokens_per_s:.0f} | {way.steps} | {way.sent_bytes / 1e6:.2f} |")
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
