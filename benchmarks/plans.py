"""The planner's own choice against a sweep of everything else, each run for real as rank 0 of N.

    python benchmarks/plans.py [--pairs llama-3.1-8b:8xH200 ...] [--seconds 1500] [--steps 4]
        [--json FILE]

For each pair of a model and a cluster: the plan that `shardwise plan` chooses, and every other
layout (mesh, reshard, recompute, micro-batch) that could fit the card, each in `shardwise tunnel`:
the real step on this device, with the modelled time of the cluster's links. The layouts run in the
order of their forecasts, from the fastest down, until the pair's share of the time is spent; those
that were not run are counted, with the best forecast among them. Every layout gets a process of its
own, forked from one that has imported torch already, so that one that runs out of memory disturbs
nobody.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

from shardwise.config.plain import config_from_dict
from shardwise.errors import ExitCode, UserError
from shardwise.facts.calibration import rates_for
from shardwise.facts.cluster import ClusterSpec, parse_cluster
from shardwise.facts.models import read_model_config, spec_from_config
from shardwise.launch.ranks import ALLOCATOR
from shardwise.plan.batch import micro_batch_candidates
from shardwise.plan.candidates import RECOMPUTE_MODES
from shardwise.plan.choose import choose_plan
from shardwise.plan.plan import Plan
from shardwise.units import GIB

PAIRS = (
    "llama-3.2-1b:8xH200",
    "llama-3.2-3b:8xH200",
    "llama-3.1-8b:8xH200",
    "qwen2.5-7b:2x8xH200",
    "llama-3.1-70b:8x8xH200",
)

Sections = dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Point:
    """One layout: what was foreseen, and what the device did. `auto` is the planner's own choice"""

    label: str
    predicted: float
    measured: float | None
    reserved_gib: float | None
    problem: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="model:cluster")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=1500, help="for all pairs together")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each layout")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.setdefault(*ALLOCATOR)
    import shardwise.tunnel.timed  # noqa: F401 - once, for all processes that are forked off

    found = {}
    ends = time.monotonic()
    for pair in given.pairs:
        ends += given.seconds / len(given.pairs)
        found[pair] = sweep(pair, given, ends)
        if given.json:
            rows = {pair: [asdict(point) for point in points] for pair, points in found.items()}
            given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\nplanner's choice against the best of the sweep, tokens/s of a device")
    for pair, (chosen, *others) in found.items():
        print_verdict(pair, chosen, others)


def sweep(pair: str, given: argparse.Namespace, ends: float) -> list[Point]:
    """The planner's choice first, then the others until the time is spent."""
    model, _, name = pair.partition(":")
    cluster, seq_len = parse_cluster(name), given.seq_len
    chosen = plan_of(model, cluster, seq_len, {})
    others = sorted(all_others(model, cluster, seq_len, chosen), key=speed_of, reverse=True)
    print(f"\n{pair}, sequences of {seq_len}: {1 + len(others)} layouts could fit", flush=True)
    points = [measure(chosen, given)]
    for number, plan in enumerate(others):
        if time.monotonic() > ends:
            left = others[number:]
            print(f"  {len(left)} not run; the best forecast of them: {speed_of(left[0]):,.0f}")
            break
        points.append(measure(plan, given))
    return points


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
            plan = plan_of(model, roomy, seq_len, {**mesh, "memory": memory, "train": train})
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


def plan_of(model: str, cluster: ClusterSpec, seq_len: int, sections: Sections) -> Plan:
    data = {"source": "synthetic", "seq_len": seq_len}
    config = config_from_dict({"model": {"name": model}, "data": data, **sections})
    source = read_model_config(config.model)
    spec = spec_from_config(model, source.hf_config)
    return choose_plan(config, spec, cluster, source, rates_for(cluster))


def measure(plan: Plan, given: argparse.Namespace) -> Point:
    """One layout in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(plan, given, theirs))
    started = time.monotonic()
    process.start()
    theirs.close()
    try:
        speed, reserved, problem = ours.recv()
    except EOFError:
        speed, reserved, problem = None, None, "the process died"
    process.join()
    point = Point(label_of(plan), speed_of(plan), speed, reserved, problem)
    took = time.monotonic() - started
    print(f"  {format_point(point)}   {took:.0f} s", flush=True)
    return point


def _measure(plan: Plan, given: argparse.Namespace, answer: Connection) -> None:
    from shardwise.tunnel.run import run_tunnel

    try:
        result = run_tunnel(plan, where=given.device, link_speed=1.0, num_steps=given.steps)
    except UserError as error:
        answer.send((None, None, error.what))
        return
    assert result.timing is not None
    reserved = result.memory.reserved_bytes
    gib = None if reserved is None else reserved / GIB
    answer.send((result.timing.tokens_per_s_per_gpu, gib, ""))


def speed_of(plan: Plan) -> float:
    """As foreseen; 0 where no rates are known."""
    return plan.forecast.tokens_per_s if plan.forecast else 0.0


def label_of(plan: Plan) -> str:
    mesh = f"{plan.replicate.value} x {plan.shard.value}"
    kept = "" if plan.reshard_after_forward.value else ", parameters kept"
    mode = plan.checkpoint_activations.value
    return (
        f"{plan.strategy.value} {mesh}{kept}, recompute {mode}, micro-batch "
        f"{plan.micro_batch.value}"
    )


def format_point(point: Point) -> str:
    measured = point.problem if point.measured is None else f"{point.measured:>9,.0f}"
    held = "" if point.reserved_gib is None else f"{point.reserved_gib:6.1f} GiB"
    return f"{point.label:<66} foreseen {point.predicted:>9,.0f}  measured {measured} {held}"


def print_verdict(pair: str, chosen: Point, others: list[Point]) -> None:
    if chosen.measured is None:
        print(f"{pair:<28} the choice did not run: {chosen.problem}")
        return
    ran = [point for point in others if point.measured is not None]
    best = max([chosen, *ran], key=lambda point: point.measured or 0.0)
    assert best.measured is not None
    loss = 1 - chosen.measured / best.measured
    print(
        f"{pair:<28} {chosen.measured:>9,.0f} against {best.measured:>9,.0f} of {1 + len(ran)} run "
        f"({loss:.1%} slower); foreseen {chosen.predicted:,.0f}; best: {best.label}"
    )


if __name__ == "__main__":
    main()
