"""Collectives for real: two nodes of two ranks on one machine, joined by a link of a known speed.

    python benchmarks/links.py [--speeds 100 400 1600] [--steps 7]

Two network namespaces play the nodes (namespaces.py), with two ranks of `shardwise train` each. The
plan knows the machine from a calibration of four ranks, and the link from `cluster.interconnect`.
For every speed and strategy its forecast stands beside the measured step time; then the planner
chooses by itself, and what it chose stands beside what was fastest. Needs Linux, root, `ip` and
`tc`.

Other programs on the machine disturb both sides. With `--patience 600` up to ten minutes go into
waiting for a quiet machine and into doing disturbed measurements again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

from namespaces import (
    CLUSTER,
    RANKS_PER_NODE,
    run_ranks,
    sent_bytes,
    shape,
    two_nodes,
    why_not_here,
)
from shardwise.facts.calibration import Calibration, calibration_folder, load_calibration
from shardwise.facts.collective_cost import ring_load
from shardwise.plan.planned import Plan

T = TypeVar("T")
STRATEGIES = ("full_shard", "hybrid_shard", "no_shard")
# Others' share of the CPU from which on a measurement is worth repeating.
DISTURBED, TRIES = 0.08, 3
COMMAND = [sys.executable, "-m", "shardwise"]
CONFIG = """
model:
  name: small-llama
  overrides: {{hidden_size: 256, intermediate_size: 768, num_attention_heads: 4,
    num_key_value_heads: 4, num_hidden_layers: {layers}}}
data:
  source: synthetic
  seq_len: 64
cluster:
  name: {cluster}
  interconnect: {gigabytes}
train:
  micro_batch: 1
  steps: {steps}
checkpoint:
  every: 0
  at_end: false
observe:
  log_every: 1
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: what was foreseen, and what happened."""

    speed: int
    strategy: str
    predicted_s: float
    measured_s: float
    expected_bytes: float
    counted_bytes: float
    others: float = 0.0
    """Share of the CPU that other programs took meanwhile."""

    @property
    def error(self) -> float:
        """Of the forecast, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speeds", type=int, nargs="+", default=[100, 400, 1600], help="Mbit/s")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--patience", type=float, default=0.0, help="seconds for a quiet machine")
    parser.add_argument("--bytes-only", action="store_true", help="no calibration, no forecast")
    parser.add_argument("--json", type=Path, help="write the cells there, too")
    options = parser.parse_args()
    reason = why_not_here()
    if reason is not None:
        sys.exit(f"cannot be measured here: {reason}")
    signal.signal(signal.SIGTERM, leave)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, two_nodes() as nodes:
        os.environ["SHARDWISE_CACHE"] = folder
        quiet = Quiet(options.patience)
        if not options.bytes_only:
            machine, _ = quiet.least_disturbed(calibrate)
            machine.save()
        bench = Bench(nodes, Path(folder), options.steps, options.layers)
        cells, picks = [], {}
        for speed in options.speeds:
            shape(nodes, speed)
            for strategy in options.strategies:
                run = partial(bench.run, speed, strategy)
                cell, others = quiet.least_disturbed(run)
                cells.append(replace(cell, others=others))
            picks[speed] = bench.pick(speed)
    show(cells, picks)
    print(f"{time.perf_counter() - started:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps([vars_of(cell) for cell in cells], indent=1))


def calibrate() -> Calibration:
    """Four ranks at once on this CPU, as the runs will have it."""
    subprocess.run([*COMMAND, "plan", "--calibrate", "--cluster", CLUSTER], check=True)
    [path] = calibration_folder().iterdir()
    return load_calibration(path)


class Bench:
    """Runs and plans over one pair of nodes."""

    def __init__(self, nodes: Sequence[str], folder: Path, steps: int, layers: int) -> None:
        self.nodes = nodes
        self.folder = folder
        self.steps = steps
        self.layers = layers

    def run(self, speed: int, strategy: str) -> Cell:
        """Train some steps on all ranks."""
        name = f"{strategy}-{speed}"
        words = [f"shard.strategy={strategy}", f"name={name}", f"runs_dir={self.folder}"]
        command = [*COMMAND, "train", str(self.config(speed)), *words]
        shutil.rmtree(self.folder / name, ignore_errors=True)
        before = sent_bytes(self.nodes[0])
        codes = run_ranks(self.nodes, command, self.folder)
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        if failed:
            logs = [self.folder / f"rank-{failed[0]}.err"]
            logs += self.folder.glob(f"{name}/logs/attempt-*/rank-{failed[0]}.log")
            words = "\n".join(log.read_text() for log in logs)
            sys.exit(f"{name}: rank {failed[0]} failed\n{words}")
        plan = Plan.load(self.folder / name / "plan.json")
        lines = (self.folder / name / "events.jsonl").read_text().splitlines()
        times = [row["step_s"] for row in map(json.loads, lines) if row["event"] == "step"]
        cell = Cell(
            speed,
            strategy,
            plan.forecast.step_s if plan.forecast else float("nan"),
            statistics.median(times[2:]),
            expected_bytes(plan),
            (sent_bytes(self.nodes[0]) - before) / self.steps,
        )
        print(f"{speed} Mbit/s {strategy}: {cell.predicted_s:.2f} s foreseen, steps "
              f"{' '.join(f'{seconds:.2f}' for seconds in times)} s", flush=True)  # fmt: skip
        return cell

    def pick(self, speed: int) -> str:
        """The strategy that the planner chooses by itself."""
        command = [*COMMAND, "plan", str(self.config(speed)), "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return str(json.loads(done.stdout)["choices"]["strategy"]["value"])

    def config(self, speed: int) -> Path:
        """The run's YAML; the link is stated in GB/s."""
        path = self.folder / f"link-{speed}.yaml"
        gigabytes = speed / 8 / 1000
        text = CONFIG.format(
            layers=self.layers, cluster=CLUSTER, gigabytes=gigabytes, steps=self.steps
        )
        path.write_text(text)
        return path


def expected_bytes(plan: Plan) -> float:
    """What a step should put on the link in one direction, by the rings of
    `facts.collective_cost`."""
    model, shard, replicate = plan.model, plan.decided.shard, plan.decided.replicate
    whole = 4.0 * model.total_params
    total = 0.0
    if shard > RANKS_PER_NODE:
        # The tail stays gathered from forward to backward. Once, before the first step, a forward
        # over a few tokens checks the form of the loss.
        gathered = (2 + 1 / plan.config.train.steps) * whole - 4.0 * model.tail_params
        total += ring_load("gloo", "all_gather", gathered, shard)[1]
        total += ring_load("gloo", "reduce_scatter", whole, shard)[1]
    if replicate > 1:
        # As many rings cross the link side by side as a node has shards.
        rings = min(shard, RANKS_PER_NODE)
        total += rings * ring_load("gloo", "all_reduce", whole / shard, replicate)[1]
    return total


class CpuUse:
    """What the CPU did since this was made, and how much of it for others."""

    def __init__(self) -> None:
        self._before = self._now()

    def of_others(self) -> float:
        """Share of the machine's time that was neither idle nor spent in our own processes."""
        busy, total, own = (
            after - before for after, before in zip(self._now(), self._before, strict=True)
        )
        return max(0.0, busy - own) / total

    def _now(self) -> tuple[float, float, float]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        scale = os.sysconf("SC_CLK_TCK")
        own = os.times()
        busy = sum(ticks) - ticks[3] - ticks[4]
        children = own.children_user + own.children_system
        return busy / scale, sum(ticks) / scale, own.user + own.system + children


class Quiet:
    """Waits for others to end, and repeats what they disturbed, until its patience is used up."""

    def __init__(self, patience_s: float) -> None:
        self.deadline = time.monotonic() + patience_s

    def least_disturbed(self, work: Callable[[], T]) -> tuple[T, float]:
        """(what it gave, others' share of the CPU) of the least disturbed of its runs."""
        found: list[tuple[T, float]] = []
        while not found or self._repeats(found[-1][1], len(found)):
            self._wait()
            use = CpuUse()
            result = work()
            found.append((result, use.of_others()))
            print(f"  others took {found[-1][1]:.0%} of the CPU", flush=True)
        return min(found, key=lambda each: each[1])

    def _repeats(self, others: float, times: int) -> bool:
        return others > DISTURBED and times < TRIES and time.monotonic() < self.deadline

    def _wait(self) -> None:
        while time.monotonic() < self.deadline:
            use = CpuUse()
            time.sleep(3)
            if use.of_others() < DISTURBED:
                return


def show(cells: Sequence[Cell], picks: dict[int, str]) -> None:
    """The table, and what the planner would have done."""
    print("\n| link | strategy | predicted s | measured s | error | MB over the link, expected "
          "and counted | others' share of the CPU |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for cell in cells:
        print(
            f"| {cell.speed} Mbit/s | {cell.strategy} | {cell.predicted_s:.2f} | "
            f"{cell.measured_s:.2f} | {cell.error:+.0%} | {cell.expected_bytes / 1e6:.1f}, "
            f"{cell.counted_bytes / 1e6:.1f} | {cell.others:.0%} |"
        )
    print("\n| link | planner's pick | fastest when measured | 1-D over HSDP, measured |")
    print("|---|---|---|---|")
    for speed, pick in picks.items():
        measured = {cell.strategy: cell.measured_s for cell in cells if cell.speed == speed}
        fastest = min(measured, key=lambda name: measured[name])
        both = {"full_shard", "hybrid_shard"} <= measured.keys()
        ratio = f"{measured['full_shard'] / measured['hybrid_shard']:.2f} x" if both else "-"
        print(f"| {speed} Mbit/s | {pick} | {fastest} | {ratio} |")


def vars_of(cell: Cell) -> dict[str, object]:
    return {name: getattr(cell, name) for name in cell.__slots__}


def leave(number: int, frame: FrameType | None) -> None:
    """A stopped benchmark still takes its namespaces away."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
