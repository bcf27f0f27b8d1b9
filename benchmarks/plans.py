"""The planner's own choice against a sweep of everything else, each run for real as rank 0 of N.

    python benchmarks/plans.py [--pairs llama-3.1-8b:8xH200 ...] [--seconds 1500] [--steps 4]
        [--json benchmarks/results/h200_plans.json]

For each pair of a model and a cluster: the plan that `shardwise plan` chooses, and every other
layout (mesh, reshard, recompute, micro-batch) that could fit the card, each in `shardwise tunnel`:
the real step on this device, with the modelled time of the cluster's links. The layouts run in the
order of their forecasts, from the fastest down, until none is left that could beat the choice by
more than the bar: one that would have to be faster than foreseen by more than `--doubt` is counted
and not run. The verdict prints that distance, and beside it the largest miss of the forecasts that
ran. What FILE holds already is not run again. Every layout gets a process of its own, forked from
one that has imported torch already, so that one that runs out of memory disturbs nobody.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from forked_measures import Sections, import_torch, measure, plan_of
from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import ClusterSpec, parse_cluster
from shardwise.plan.batch import micro_batch_candidates
from shardwise.plan.candidates import RECOMPUTE_MODES
from shardwise.plan.planned import Plan
from shardwise.units import GIB

PAIRS = (
    "llama-3.2-1b:8xH200",
    "llama-3.2-3b:8xH200",
    "llama-3.1-8b:8xH200",
    "llama-3.2-1b:2x8xH200",
    "qwen2.5-32b:4x8xH200",
)
BAR = 0.03  # the choice may be this much slower than the best layout that there is


@dataclass(frozen=True, slots=True)
class Point:
    """One layout: what was foreseen, and what the device did. `auto` is the planner's own choice"""

    label: str
    predicted: float
    measured: float | None
    reserved_gib: float | None
    problem: str = ""


Book = dict[str, dict[str, Point]]  # pair -> label -> what was measured


@dataclass(frozen=True, slots=True)
class Sweep:
    """A pair's layouts that ran, the planner's choice first, and the forecast of the best left.

    Forecasts are those of today, beside what was measured then.
    """

    points: list[tuple[Plan, Point]]
    layouts: int
    best_left: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="model:cluster")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=1500, help="for all pairs together")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each layout")
    parser.add_argument("--doubt", type=float, default=BAR, help="how far a forecast may be low")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="measured before; what is new is added to it")
    given = parser.parse_args()
    import_torch()
    book = read_book(given.json)
    found = {}
    ends = time.monotonic() + given.seconds
    for pair in given.pairs:
        found[pair] = sweep(pair, given, ends, book.setdefault(pair, {}))
        if given.json:
            write_book(book, given.json)
    print("\nplanner's choice against the best of the sweep, tokens/s of a device")
    for pair, swept in found.items():
        print_verdict(pair, swept)


def read_book(path: Path | None) -> Book:
    if path is None or not path.exists():
        return {}
    pairs = json.loads(path.read_text(encoding="utf-8"))["pairs"]
    return {pair: {row["label"]: Point(**row) for row in rows} for pair, rows in pairs.items()}


def write_book(book: Book, path: Path) -> None:
    pairs = {pair: [asdict(point) for point in points.values()] for pair, points in book.items()}
    text = json.dumps({"how": "python benchmarks/plans.py", "pairs": pairs}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def sweep(pair: str, given: argparse.Namespace, ends: float, known: dict[str, Point]) -> Sweep:
    """The planner's choice first, then all that might beat it, while there is time."""
    model, _, name = pair.partition(":")
    cluster, seq_len = parse_cluster(name), given.seq_len
    chosen = plan_with(model, cluster, seq_len, {})
    others = sorted(all_others(model, cluster, seq_len, chosen), key=speed_of, reverse=True)
    print(f"\n{pair}, sequences of {seq_len}: {1 + len(others)} layouts could fit", flush=True)
    points: list[tuple[Plan, Point]] = []
    for plan in (chosen, *others):
        label = label_of(plan)
        if label not in known:
            if points and hopeless(points[0][1], speed_of(plan), given.doubt):
                continue
            if time.monotonic() > ends:
                break
            known[label] = run(plan, given)
        points.append((plan, known[label]))
        print(f"  {format_point(plan, known[label])}", flush=True)
    ran = {point.label for _, point in points}
    best_left = max((speed_of(plan) for plan in others if label_of(plan) not in ran), default=0.0)
    return Sweep(points, 1 + len(others), best_left)


def hopeless(chosen: Point, foreseen: float, doubt: float) -> bool:
    """Whether a layout, `doubt` faster than foreseen, would still leave the choice in the bar."""
    return chosen.measured is not None and foreseen * (1 + doubt) < chosen.measured / (1 - BAR)


def all_others(model: str, cluster: ClusterSpec, seq_len: int, chosen: Plan) -> Iterator[Plan]:
    """Every layout that could fit, those with no headroom at all included, but for the chosen."""
    micros = micro_batch_candidates(
        chosen.config.train, cluster.world_size, seq_len, cluster.device
    )
    # A card that is a little larger on paper lets through what the planner finds too tight.
    roomy = replace(cluster, memory_bytes=int(1.1 * cluster.memory_bytes))
    for mesh, mode, micro in product(all_meshes(cluster), RECOMPUTE_MODES, micros):
        memory, train = {"checkpoint_activations": mode}, {"micro_batch": micro}
        try:
            plan = plan_with(model, roomy, seq_len, {**mesh, "memory": memory, "train": train})
        except UserError as error:
            if error.code != ExitCode.DOES_NOT_FIT:
                raise
            continue
        if plan.memory.total <= cluster.memory_bytes and label_of(plan) != label_of(chosen):
            yield plan


def all_meshes(cluster: ClusterSpec) -> Iterator[Sections]:
    """Every strategy; copies over any number of whole nodes, with parameters freed and kept."""
    for strategy in ("no_shard", "shard_grad_op", "full_shard"):
        yield {"shard": {"strategy": strategy}}
    world, node = cluster.world_size, cluster.devices_per_node
    for shard in (size for size in range(node, world, node) if world % size == 0):
        for reshard in (True, False):
            strategy = {"strategy": "hybrid_shard", "reshard_after_forward": reshard}
            yield {"shard": strategy, "mesh": {"shard": shard}}


def plan_with(model: str, cluster: ClusterSpec, seq_len: int, sections: Sections) -> Plan:
    return plan_of(cluster, {"model": {"name": model}, "data": {"seq_len": seq_len}, **sections})


def run(plan: Plan, given: argparse.Namespace) -> Point:
    """One layout in a process of its own."""
    found = measure(plan, device=given.device, link_speed=1.0, steps=given.steps)
    label, foreseen = label_of(plan), speed_of(plan)
    if isinstance(found, str):
        return Point(label, foreseen, None, None, found)
    return Point(label, foreseen, found.tokens_per_s, found.reserved_gib)


def speed_of(plan: Plan) -> float:
    """As foreseen; 0 where no rates are known."""
    return plan.forecast.tokens_per_s if plan.forecast else 0.0


def label_of(plan: Plan) -> str:
    mesh = f"{plan.decided.replicate} x {plan.decided.shard}"
    kept = "" if plan.decided.reshard_after_forward else ", parameters kept"
    mode = plan.decided.checkpoint_activations
    return (
        f"{plan.decided.strategy} {mesh}{kept}, recompute {mode}, micro-batch "
        f"{plan.decided.micro_batch}"
    )


def format_point(plan: Plan, point: Point) -> str:
    measured = point.problem if point.measured is None else f"{point.measured:>9,.0f}"
    held = f"foreseen {plan.memory.reserved / GIB:6.1f} GiB"
    if point.reserved_gib is not None:
        held += f"  reserved {point.reserved_gib:6.1f}"
    return f"{point.label:<66} foreseen {speed_of(plan):>9,.0f}  measured {measured}  {held}"


def print_verdict(pair: str, swept: Sweep) -> None:
    if not swept.points:
        print(f"{pair:<28} not run: the time was up")
        return
    _, chosen = swept.points[0]
    if chosen.measured is None:
        print(f"{pair:<28} the choice did not run: {chosen.problem}")
        return
    ran = [(plan, point) for plan, point in swept.points if point.measured is not None]
    _, best = max(ran, key=lambda pair: pair[1].measured or 0.0)
    assert best.measured is not None
    loss = 1 - chosen.measured / best.measured
    held = [
        plan.memory.reserved / GIB / point.reserved_gib - 1
        for plan, point in ran
        if point.reserved_gib
    ]
    print(
        f"{pair:<28} {chosen.measured:>9,.0f} against {best.measured:>9,.0f}: {loss:.1%} slower "
        f"than the best of {len(ran)} ({best.label})"
    )
    print(f"{'':<28} memory foreseen {min(held):+.1%} to {max(held):+.1%} off what was reserved")
    if swept.best_left:
        needed = chosen.measured / (1 - BAR) / swept.best_left - 1
        low = max((point.measured or 0.0) / speed_of(plan) - 1 for plan, point in ran)
        print(
            f"{'':<28} {swept.layouts - len(swept.points)} not run: the best would have to be "
            f"{needed:.1%} faster than foreseen; of those that ran none was by more than {low:.1%}"
        )


if __name__ == "__main__":
    main()
