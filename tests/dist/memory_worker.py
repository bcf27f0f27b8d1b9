"""Build a 70M-parameter model on a rank, and say how far its resident memory rose."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.config.plain import config_from_dict
from shardwise.launch.prepare import choose_plan
from shardwise.parallel.mesh import build_mesh
from shardwise.training.session import build_model

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
}


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def warm_up() -> None:
    """Import the family's code and touch every kernel, so that only the model itself is counted."""
    ranks = dist.get_world_size()
    sections = {"model": {"name": "tiny-llama"}, "cluster": {"name": f"{ranks}xCPU"}}
    plan = choose_plan(config_from_dict(sections), environ={})
    build_model(plan, build_mesh(plan), lambda text: None)


def build(weights: str) -> dict[str, float]:
    """On every rank; `weights` is a directory, or `random`."""
    model = {"name": weights} if weights != "random" else {"name": "tiny-llama", "overrides": SHAPE}
    cluster = {"name": f"{dist.get_world_size()}xCPU"}
    sections = {"model": model, "cluster": cluster, "shard": {"strategy": "full_shard"}}
    plan = choose_plan(config_from_dict(sections), environ={})
    mesh = build_mesh(plan)
    warm_up()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    built, units = build_model(plan, mesh, lambda text: None)
    growth = resident("VmHWM") - before
    return {
        "growth": growth,
        "shard": sum(p.to_local().nbytes for p in built.parameters() if isinstance(p, DTensor)),
        "largest_unit": 4 * max(unit.num_params for unit in units.units),
        "params": plan.model.total_params,
        "checksum": float(sum(p.to_local().double().abs().sum() for p in built.parameters())),
    }
