"""Rank 0 of runs whose ranks share work: what they are, and their measurement in the tunnel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from family_rows import planned, shortest
from forked_measures import plan_of
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.presets import PRESETS
from shardwise.plan.planned import Plan
from shardwise.units import GIB

_TINY_LEN = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One run."""

    model: str
    nodes: str
    """Nodes and their GPUs, such as 8x8."""

    axes: tuple[tuple[str, int], ...]
    seq_len: int
    steps: int
    """Measured over free links, and then over modelled ones."""

    seconds: float
    """No run takes longer, unless something hangs."""

    attention: str = "auto"
    modelled: bool = True
    """Whether the links have a speed."""

    def __str__(self) -> str:
        mesh = "-".join(f"{name}{count}" for name, count in self.axes) or "planned"
        more = "" if self.attention == "auto" else f"-{self.attention}"
        return f"{self.model}/{self.nodes}/{mesh}@{self.seq_len}{more}"

    @property
    def names(self) -> dict[str, Any]:
        """What it is, as the results have it."""
        return {"row": str(self), "mesh": dict(self.axes), "who": "ours"}

    @property
    def is_planned_only(self) -> bool:
        """Whether it only asks which axes the planner takes."""
        return not self.axes

    @property
    def stands_in(self) -> bool:
        """Whether it is for the case that another row fails."""
        return self.attention != "auto"

    @property
    def usual(self) -> Row:
        """The row that it stands in for."""
        return replace(self, attention="auto", modelled=True)

    def tiny(self) -> Row:
        """The same for CPUs."""
        small = "tiny-mixtral" if "num_experts" in PRESETS[self.model] else "tiny-llama"
        few = tuple((name, min(count, 2)) for name, count in self.axes)
        nodes, axes = ("2x4", few) if "x" in self.nodes else (self.nodes, self.axes)
        return replace(self, model=small, nodes=nodes, axes=axes, seq_len=_TINY_LEN, steps=1)


_LLAMA, _MIXTURE, _LARGE = "llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-70b"
_LONG = Row(_LLAMA, "8", (("context", 8),), 131_072, steps=1, seconds=90)
_HYBRID = (("replicate", 4), ("shard", 8), ("tensor", 2))
# In the order of their worth. The last stands in for the first, should its kernel fail.
ROWS = {
    str(row): row
    for row in (
        _LONG,
        Row(_MIXTURE, "8", (("expert", 8),), 4096, steps=3, seconds=60),
        Row(_MIXTURE, "8", (("expert", 1),), 4096, steps=3, seconds=60),
        Row(_LARGE, "8x8", _HYBRID, 4096, steps=2, seconds=75),
        Row(_MIXTURE, "8", (), 4096, steps=1, seconds=30),
        replace(_LONG, attention="flex_attention", modelled=False),
    )
}


def plan_row(row: Row, gpu: str) -> Plan:
    """The plan of this run."""
    on_cpu = gpu == "CPU"
    model: dict[str, object] = {"name": row.model, "attention": row.attention}
    if row.model == "tiny-mixtral":
        model["overrides"] = {"num_local_experts": 8}
    train = {"micro_batch": 1} if row.seq_len > 2**16 or on_cpu else {}
    return plan_of(
        parse_cluster(f"{row.nodes}x{gpu}"),
        {
            "model": model,
            "mesh": dict(row.axes),
            "data": {"seq_len": row.seq_len},
            "memory": {"compile": False} if on_cpu else {},
            "precision": {"param": "fp32"} if on_cpu else {},
            "train": {**train, "accumulation": 1},
        },
    )


def said_of(plan: Plan) -> dict[str, Any]:
    """What the plan says."""
    decided, forecast = plan.decided, plan.forecast
    picked = {
        name: getattr(decided, name)
        for name in ("replicate", "shard", "context", "tensor", "expert", "micro_batch")
    }
    return {
        **planned(plan),
        "picked": picked | {"recompute": decided.checkpoint_activations},
        "plan_linked_tok_s": forecast.tokens_per_s if forecast else None,
        "plan_mfu": forecast.mfu if forecast else None,
    }


def compile_row(plan: Plan, device: str) -> dict[str, Any]:
    """One step of a model of two blocks, so that the compiler's results are on disk."""
    return measure_row(shortest(plan, 2), device, 1, modelled=False)


def measure_row(plan: Plan, device: str, steps: int, *, modelled: bool) -> dict[str, Any]:
    """Run it as rank 0, over free links and then, where they are `modelled`, over the cluster's."""
    import torch._inductor.config as inductor

    from shardwise.tunnel.result_text import traffic_rows
    from shardwise.tunnel.tunnel_run import run_tunnel

    # Results are on disk, or other rows compile beside it.
    inductor.compile_threads = 1
    speed = 1.0 if modelled else inf
    result = run_tunnel(plan, where=device, link_speed=speed, num_steps=steps)
    memory, timing = result.memory, result.timing
    assert timing is not None
    reserved = memory.reserved_bytes
    free_speed = timing.step_s / timing.free_step_s
    return {
        "step_ms": 1e3 * timing.step_s,
        "free_step_ms": 1e3 * timing.free_step_s,
        "exposed_ms": 1e3 * timing.exposed_s,
        "modelled_ms": 1e3 * result.communication_s,
        "emulated_ms": 1e3 * timing.emulated_s,
        "tok_s": timing.tokens_per_s_per_gpu,
        "free_tok_s": timing.tokens_per_s_per_gpu * free_speed,
        "mfu": timing.mfu,
        "free_mfu": timing.mfu and timing.mfu * free_speed,
        "hfu": timing.hfu,
        "allocated_gib": memory.allocated_bytes / GIB,
        "reserved_gib": None if reserved is None else reserved / GIB,
        "collectives": traffic_rows(result),
        "notes": result.notes,
    }
