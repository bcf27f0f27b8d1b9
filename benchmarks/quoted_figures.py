"""Commonly quoted sizing and cost figures of FSDP, beside what the planner says of them.

    python benchmarks/quoted_figures.py [--markdown] [--adapters]

For each row: the published throughput and memory, the planner's, and the ceiling: tokens per second
if every FLOP of the row, recompute included, ran at the chip's dense peak. A row above its ceiling
cannot be true of that chip; one above the reach of the best measured matmul is out of reach too.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.families import spec_from_config
from shardwise.facts.flops import flops_per_token, recompute_flops_per_token
from shardwise.facts.models import ModelSpec
from shardwise.facts.presets import PRESETS
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan
from shardwise.units import GIB

SEQ_LEN = 4096
# The largest share of its dense peak that any matmul has been measured to reach.
BEST_MATMUL = {"A100-80GB": 0.87, "H100": 0.80}


@dataclass(frozen=True)
class Row:
    """One published row."""

    label: str
    model: str
    cluster: str
    overrides: tuple[str, ...]
    memory_gb: float
    tokens_per_s: float


FULL = ("shard.strategy=full_shard",)
HSDP_TP = ("shard.strategy=hybrid_shard", "mesh.tensor=2")
SIZING = (
    Row("7B, 8x A100, FULL_SHARD", "llama-2-7b", "8xA100-80GB", FULL, 36, 8200),
    Row("7B, 8x H100, FULL_SHARD", "llama-2-7b", "8xH100", FULL, 32, 14800),
    Row("8B, 8x H100, FULL_SHARD", "llama-3.1-8b", "8xH100", FULL, 38, 13500),
    Row("13B, 8x H100, FULL_SHARD", "llama-2-13b", "8xH100", FULL, 52, 8400),
    Row("70B, 8x H100, FULL_SHARD", "llama-3.1-70b", "8xH100", FULL, 74, 2400),
    Row(
        "70B, 8x H100, CPU offload",
        "llama-3.1-70b",
        "8xH100",
        (*FULL, "memory.offload=cpu"),
        58,
        950,
    ),
    Row(
        "70B, 32x H100, HYBRID_SHARD",
        "llama-3.1-70b",
        "4x8xH100",
        ("shard.strategy=hybrid_shard",),
        52,
        2650,
    ),
    Row(
        "70B, 64x H100, HYBRID_SHARD",
        "llama-3.1-70b",
        "8x8xH100",
        ("shard.strategy=hybrid_shard",),
        46,
        2700,
    ),
    Row("70B, 32x H100, HSDP x TP=2", "llama-3.1-70b", "4x8xH100", HSDP_TP, 38, 2900),
    Row(
        "8x7B MoE, 16x H100, EP=4",
        "mixtral-8x7b",
        "2x8xH100",
        (*FULL, "mesh.expert=4"),
        62,
        2200,
    ),
)


@dataclass(frozen=True)
class Cost:
    """One published cost of a billion tokens, Llama 3.1 70B."""

    label: str
    cluster: str
    overrides: tuple[str, ...]
    hours: float
    usd: float


OFFLOAD = (*FULL, "memory.offload=cpu")
COSTS = (
    Cost("FULL_SHARD, 8x H100", "8xH100", FULL, 50, 1240),
    Cost("FULL_SHARD + offload, 8x H100", "8xH100", OFFLOAD, 125, 3550),
    Cost("HYBRID_SHARD, 32x H100", "4x8xH100", ("shard.strategy=hybrid_shard",), 11, 1091),
    Cost("FULL_SHARD, 32x H100 (the planner's choice)", "4x8xH100", (), 11, 1091),
    Cost("HSDP x TP=2, 32x H100", "4x8xH100", HSDP_TP, 10, 992),
)
QLORA = (*OFFLOAD, "adapter.method=lora", "adapter.base=nf4")
ADAPTED_SIZING = (
    Row("70B QLoRA, 8x H100, CPU offload", "llama-3.1-70b", "8xH100", QLORA, 44, 1800),
)
ADAPTED_COSTS = (Cost("QLoRA + offload, 8x H100", "8xH100", QLORA, 65, 1846),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--adapters", action="store_true", help="rows of QLoRA, in half a minute")
    given = parser.parse_args()
    sizing, costs = (ADAPTED_SIZING, ADAPTED_COSTS) if given.adapters else (SIZING, COSTS)
    head: tuple[str, ...] = ("row", "published", "plan", "ceiling", "verdict")
    _print(head, [_line(row) for row in sizing], markdown=given.markdown)
    print()
    head = ("1B tokens, 70B", "published", "that is", "plan")
    _print(head, [_cost_line(cost) for cost in costs], markdown=given.markdown)


def _print(head: tuple[str, ...], lines: list[tuple[str, ...]], *, markdown: bool) -> None:
    if markdown:
        rows = [head, ("---",) * len(head), *lines]
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
        return
    widths = [max(len(row[index]) for row in (head, *lines)) for index in range(len(head))]
    for row in (head, *lines):
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def _cost_line(cost: Cost) -> tuple[str, ...]:
    devices = parse_cluster(cost.cluster).world_size
    implied = f"{1e9 / devices / 3600 / cost.hours:,.0f} tok/s/gpu"
    published = f"{cost.hours:.0f} h, USD {cost.usd:,.0f}"
    row = Row(cost.label, "llama-3.1-70b", cost.cluster, cost.overrides, 0, 0)
    plan, refusal = _plan_of(row)
    if plan is None or plan.forecast is None:
        return cost.label, published, implied, f"does not fit: {refusal}"
    forecast = plan.forecast
    figures = (
        f"{forecast.hours_per_billion_tokens:.0f} h, USD {forecast.usd_per_billion_tokens:,.0f}"
    )
    return cost.label, published, implied, f"{figures} ({forecast.tokens_per_s:,.0f} tok/s/gpu)"


def _line(row: Row) -> tuple[str, ...]:
    published = f"{row.tokens_per_s:,.0f} tok/s, {row.memory_gb:.0f} GB"
    plan, refusal = _plan_of(row)
    spec = plan.model if plan else spec_from_config(row.model, PRESETS[row.model])
    ceiling, reach = _ceiling(row, spec)
    return (
        row.label,
        published,
        _planned(plan),
        f"{ceiling:,.0f}",
        refusal or _verdict(row, ceiling, reach),
    )


def _ceiling(row: Row, spec: ModelSpec) -> tuple[float, float]:
    """(tokens per second at the dense peak, at the best measured matmul), recompute included."""
    gpu = parse_cluster(row.cluster).gpu
    if gpu is None:
        raise ValueError(row.cluster)
    flops = flops_per_token(spec, SEQ_LEN) + recompute_flops_per_token(spec, SEQ_LEN, 1.0)
    peak = gpu.peak_flops["bf16"] / flops
    return peak, BEST_MATMUL[gpu.name] * peak


def _planned(plan: Plan | None) -> str:
    """What the planner says."""
    if plan is None or plan.forecast is None:
        return "does not fit"
    return f"{plan.forecast.tokens_per_s:,.0f} tok/s, {plan.memory.total / GIB:.0f} GiB"


def _plan_of(row: Row) -> tuple[Plan | None, str]:
    """The plan with full recompute, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        file.write_text("")
        words = [f"model.name={row.model}", f"cluster.name={row.cluster}", *row.overrides]
        words += [f"data.seq_len={SEQ_LEN}", "memory.checkpoint_activations=full"]
        try:
            return choose_plan(load_config(file, words), {}), ""
        except UserError as error:
            return None, error.why


def _verdict(row: Row, ceiling: float, reach: float) -> str:
    if row.tokens_per_s > ceiling:
        return "impossible: above the chip's dense peak with the recompute that the row states"
    if row.tokens_per_s > reach:
        return f"out of reach: {row.tokens_per_s / ceiling:.0%} of the peak, no matmul runs so fast"
    if row.tokens_per_s > 0.75 * reach:
        return f"needs {row.tokens_per_s / ceiling:.0%} of the dense peak in every kernel"
    return "reachable"


if __name__ == "__main__":
    main()
