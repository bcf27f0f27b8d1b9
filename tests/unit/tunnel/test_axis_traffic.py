"""Bytes along each axis: the plan's formulas beside what the tunnel counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Tunnel = Callable[..., dict[str, Any]]

# Two blocks of each: large enough for norms, agreed numbers and latencies to vanish.
LLAMA = "model={name: llama-3.1-8b, overrides: {num_hidden_layers: 2}}"
MIXTURE = "model={name: mixtral-8x7b, overrides: {num_hidden_layers: 2}}"
COMMON = (
    *("data.seq_len=4096", "train.micro_batch=1", "shard.strategy=auto", "--device", "fake"),
    *("memory.compile=false", "train.kernels=torch", "memory.checkpoint_activations=none"),
)
RECOMPUTED, SELECTIVE = (f"memory.checkpoint_activations={how}" for how in ("full", "selective"))
MESHES = {
    "shard": ("4xH100", "shard.strategy=full_shard"),
    "shard, kept gathered": ("4xH100", "shard.strategy=shard_grad_op", "train.accumulation=2"),
    "replicate": ("2x2xH100", "mesh.replicate=2", "mesh.shard=2"),
    "tensor": ("4xH100", "mesh.tensor=2"),
    "tensor, recomputed": ("4xH100", "mesh.tensor=2", RECOMPUTED),
    "tensor, selective": ("4xH100", "mesh.tensor=2", SELECTIVE),
    "tensor, not the sequence": ("4xH100", "mesh.tensor=2", "mesh.sequence_parallel=false"),
    "context": ("4xH100", "mesh.context=2"),
    "context, recomputed": ("4xH100", "mesh.context=4", RECOMPUTED),
    "all but experts": ("2x8xH100", *(f"mesh.{a}=2" for a in ("replicate", "tensor", "context"))),
    "expert": ("4xH100", "mesh.expert=2"),
    "expert, kept gathered": ("4xH100", "mesh.expert=2", "shard.keep_experts=true"),
    "expert, recomputed": ("4xH100", "mesh.expert=4", RECOMPUTED),
    "all": ("8xH100", "mesh.tensor=2", "mesh.context=2", "mesh.expert=4"),
}


CHEAP = ("shard, kept gathered", "expert, kept gathered", "all but experts", "all")
CASES = [pytest.param(n, marks=[] if n in CHEAP else pytest.mark.long) for n in MESHES]


@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_are_those_that_a_step_moves(tunnel: Tunnel, name: str) -> None:
    cluster, *words = MESHES[name]
    model = MIXTURE if any("expert" in word for word in words) else LLAMA
    found = tunnel(model, "--cluster", cluster, *COMMON, *words)
    named = {word.removeprefix("mesh.").partition("=")[0] for word in words if "mesh." in word}
    assert named - {"sequence_parallel"} <= set(found["axes"])
    for axis, row in found["axes"].items():
        print(f"{axis:10} {row['bytes']:12.0f} planned {row['planned_bytes']:12.0f}")
        assert row["planned_bytes"] == pytest.approx(row["bytes"], rel=0.001)
        assert row["planned_s"] == pytest.approx(row["seconds"], rel=0.05)
