"""Predicted against measured peak memory, on steps that were measured on one H200.

    python benchmarks/memory.py [--rows FILE]
    python benchmarks/memory.py --measure NEW [--rows FILE] [--seconds 900]

Reads rows of benchmarks/results/h200_steps.json's form, predicts each with the planner's memory
model, and prints allocated and reserved peaks beside the measurement. With --measure the steps of
these rows are run again on this GPU, as rank 0 over links that take no time, and written to NEW.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from forked_measures import import_torch, measure, plan_of
from shardwise.facts.cluster import ClusterSpec, parse_cluster
from shardwise.facts.families import spec_from_config
from shardwise.facts.models import ModelSpec
from shardwise.facts.presets import PRESETS
from shardwise.plan.activations import activations_of
from shardwise.plan.basis import narrow_slice_tokens
from shardwise.plan.decisions import Decisions
from shardwise.plan.memory import estimate_memory, gradient_bytes
from shardwise.plan.planned import MemoryEstimate, Plan
from shardwise.plan.reserved import pool_bytes
from shardwise.units import GIB

ROWS = Path(__file__).parent / "results" / "h200_steps.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--measure", type=Path, help="the file for what is measured now")
    parser.add_argument("--seconds", type=float, default=900, help="begin no step after these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    data = json.loads(given.rows.read_text(encoding="utf-8"))
    if given.measure:
        old, data["rows"] = data["rows"], []
        for row in measure_rows(old, given):
            data["rows"].append(row)
            given.measure.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"{data['machine']}: {data['how']}")
    print("  alloc  predicted  error   reserved  predicted  error   peak      step")
    errors = [_print_row(row) for row in data["rows"]]
    _print_bars("allocated", [each[0] for each in errors])
    _print_bars("reserved", [each[1] for each in errors if each[1] is not None])


def measure_rows(rows: list[dict[str, Any]], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Those that the time is enough for, measured on this device."""
    import_torch()
    ends = time.monotonic() + given.seconds
    for number, row in enumerate(rows):
        if time.monotonic() > ends:
            print(f"{len(rows) - number} of {len(rows)} were not run: the time is spent")
            return
        found = measure(planned(row), device=given.device, link_speed=inf, steps=2)
        if isinstance(found, str):
            print(f"not measured: {describe(row)}: {found}", flush=True)
            continue
        print(f"{found.allocated_gib:7.2f} GiB  {describe(row)}", flush=True)
        yield {
            **{key: value for key, value in row.items() if key != "by"},
            "allocated_gib": round(found.allocated_gib, 3),
            "reserved_gib": None if found.reserved_gib is None else round(found.reserved_gib, 3),
            "step_ms": round(1e3 * found.step_s, 1),
            "tokens_per_s": round(found.tokens_per_s),
        }


def planned(row: dict[str, Any]) -> Plan:
    """The run of a row."""
    overrides = {"num_hidden_layers": row["layers"]} if row["layers"] else {}
    return plan_of(
        cluster_of(row),
        {
            "model": {"name": row["model"], "overrides": overrides},
            "data": {"seq_len": row["seq_len"]},
            "shard": {
                "strategy": row["strategy"],
                "gather_in_place": row.get("gather_in_place", False),
            },
            "memory": {
                "checkpoint_activations": row["checkpoint_activations"],
                "compile": row["compile"],
                "loss": row["loss"],
                "accumulate": row["accumulate"],
                "offload_activations": row.get("offload_activations", 0.0),
            },
            "precision": {"linear": "float8" if row["float8"] else "param"},
            "train": {"micro_batch": row["micro_batch"], "accumulation": row["accumulation"]},
        },
    )


def cluster_of(row: dict[str, Any]) -> ClusterSpec:
    """Nodes of eight."""
    world = row["world"]
    return parse_cluster(f"{max(1, world // 8)}x{min(8, world)}xH200")


def spec_of(row: dict[str, Any]) -> ModelSpec:
    """The model of a row, cut to its layers."""
    config = dict(PRESETS[row["model"]])
    if row["layers"]:
        config["num_hidden_layers"] = row["layers"]
    return spec_from_config(row["model"], config)


def decisions_of(row: dict[str, Any]) -> Decisions:
    """What a row was run with."""
    # What plans took when these rows were measured.
    chunk = narrow_slice_tokens(spec_of(row).vocab_size, compiled=row["compile"])
    return Decisions(
        replicate=_replicas(row),
        shard=row["world"] // _replicas(row),
        reshard_after_forward=row["strategy"] not in ("no_shard", "shard_grad_op"),
        param_dtype="bf16",
        reduce_dtype="fp32",
        checkpoint_activations=row["checkpoint_activations"],
        compile=row["compile"],
        offload=False,
        micro_batch=row["micro_batch"],
        accumulation=row["accumulation"],
        seq_len=row["seq_len"],
        loss=row["loss"],
        loss_chunk_tokens=chunk,
        accumulate=row["accumulate"],
        offload_activations=row.get("offload_activations", 0.0),
        linear=_linear(row),
        float8_gather=True,
        kernels="torch" if "by" in row else "own",
        gather_in_place=row.get("gather_in_place", False),
    )


def _linear(row: dict[str, Any]) -> str:
    if not row["float8"]:
        return "param"
    return "float8_rowwise" if is_bare(row) else "float8"  # torchao's layers keep what those keep


def _replicas(row: dict[str, Any]) -> int:
    """Copies of the model: one a rank, one a node of eight, or one."""
    per_copy = {"no_shard": 1, "hybrid_shard": 8}.get(row["strategy"], row["world"])
    return int(row["world"] // per_copy)


def predict(row: dict[str, Any]) -> MemoryEstimate:
    """The planner's estimate for a measured row."""
    spec, cluster, decided = spec_of(row), cluster_of(row), decisions_of(row)
    if "by" not in row:
        return estimate_memory(spec, cluster, decided)
    loss_bytes = _loss_bytes_before(row, spec, decided) if row["loss"] == "chunked" else None
    found = estimate_memory(spec, cluster, decided, loss_bytes=loss_bytes)
    if row["world"] == 1:
        return found
    # Gradient shards had memory of their own.
    _, waiting = gradient_bytes(spec, decided, -(-spec.total_params // decided.shard))
    return replace(
        found,
        allocator=waiting + pool_bytes(spec, cluster, decided, activations_of(spec, decided).kept),
    )


def _loss_bytes_before(row: dict[str, Any], spec: ModelSpec, decided: Decisions) -> int:
    """The head's gradient and logits, when these were apart from their own gradient."""
    head = spec.vocab_size * spec.hidden_size
    if is_bare(row):
        # It scales the head's fp32 gradient into a second copy, and casts that.
        return (4 + 4 + 2) * head
    chunk = decided.slice_tokens or decided.tokens
    logits = min(decided.tokens, chunk) * spec.vocab_size
    width = (6 if decided.tokens > chunk else 4) if decided.compile else 14
    return max(6 * head, 4 * head + width * logits)


def is_bare(row: dict[str, Any]) -> bool:
    """Whether the script of before shardwise measured it: torchao's layers, a loss of its own.

    Other rows that say by whom are of shardwise before gradients and logits shared memory.
    """
    return row.get("by") == "bare script"


def describe(row: dict[str, Any]) -> str:
    """A row in a few words."""
    layers = f" ({row['layers']} layers)" if row["layers"] else ""
    passes = f" x {row['accumulation']} {row['accumulate']}" if row["accumulation"] > 1 else ""
    how = "float8" if row["float8"] else "compiled" if row["compile"] else "eager"
    loss = "" if row["loss"] == "chunked" else ", all logits"
    gather = ", gathered in place" if row.get("gather_in_place") else ""
    return (
        f"{row['model']}{layers}, rank 0 of {row['world']}, {row['micro_batch']} x "
        f"{row['seq_len']}{passes}, recompute {row['checkpoint_activations']}, {how}{loss}{gather}"
    )


def _print_row(row: dict[str, Any]) -> tuple[float, float | None]:
    found = predict(row)
    allocated, reserved = found.allocated / GIB, found.reserved / GIB
    error = allocated / row["allocated_gib"] - 1
    text = f"{row['allocated_gib']:7.2f}  {allocated:9.2f}  {error:+.1%}"
    if row["reserved_gib"] is None:
        print(f"{text}                               {found.peak:8}  {describe(row)}")
        return error, None
    wrong = reserved / row["reserved_gib"] - 1
    text += f"   {row['reserved_gib']:8.2f}  {reserved:9.2f}  {wrong:+.1%}"
    print(f"{text}   {found.peak:8}  {describe(row)}")
    return error, wrong


def _print_bars(name: str, errors: list[float]) -> None:
    if not errors:
        return
    sizes = [abs(error) for error in errors]
    print(
        f"{name}: {len(errors)} rows, median {statistics.median(sizes):.1%}, largest "
        f"{max(sizes):.1%}, largest under-prediction {max(0.0, -min(errors)):.1%}"
    )


if __name__ == "__main__":
    main()
