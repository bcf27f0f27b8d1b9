"""Ranks that divide blocks, sequences and experts at once train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from family_runs import HEADER, compare
from gradient_runs import assert_gradients
from rank_pool import Ranks
from tiny_runs import Settings

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
BLOCKS: Settings = {"mesh.tensor": 2}
SEQUENCES: Settings = {"mesh.context": 2}
EXPERTS: Settings = {"mesh.shard": 2, "mesh.expert": 2}
SHARDED: Settings = {"mesh.shard": 2}
COPIES: Settings = {"mesh.replicate": 2, "mesh.shard": 1}
BOTH: Settings = {**BLOCKS, **SEQUENCES}
# A world, and how it is divided. Experts lie on the ranks of all other axes but `replicate`.
MESHES: dict[str, tuple[int, Settings]] = {
    "TP x CP x EP 2": (4, {**BOTH, "mesh.expert": 2}),
    "TP x CP x EP 4": (4, {**BOTH, "mesh.expert": 4}),
    "FSDP x TP x CP x EP 2": (8, {**BOTH, **SHARDED, "mesh.expert": 2}),
    "FSDP x TP x CP x EP 4": (8, {**BOTH, **SHARDED, "mesh.expert": 4}),
    "HSDP x TP x CP x EP 4": (8, {**BOTH, **COPIES, "mesh.expert": 4}),
    "recomputed": (
        4,
        {**BOTH, "mesh.expert": 2, "memory.checkpoint_activations": "selective"},
    ),
}
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
SAMPLE = [("qwen3_moe", "TP x CP x EP 2")]
GRID = [
    pytest.param(family, mesh, marks=[] if (family, mesh) in SAMPLE else pytest.mark.long)
    for family in FAMILIES
    for mesh in MESHES
]


@pytest.mark.parametrize(("family", "mesh"), GRID)
def test_a_mixture_trains_as_in_one_process(
    ranks: Pools, tmp_path: Path, family: str, mesh: str
) -> None:
    """Through a router's losses where there are any, a checkpoint and its export."""
    world, axes = MESHES[mesh]
    wanted = {"shard.strategy": "auto", "data.seq_len": 32, **axes}
    found = compare(ranks(world), family, tmp_path, wanted)
    assert found.is_equal, f"\n{HEADER}\n{found.row()}"


# Axes alone and together, with and without sequence parallelism, and their gradients one by one.
GRADIENTS: dict[str, tuple[str, int, Settings]] = {
    "TP": ("qwen3", 2, BLOCKS),
    "TP without SP": ("qwen3", 2, {**BLOCKS, "mesh.sequence_parallel": False}),
    "CP": ("gemma3_text", 2, SEQUENCES),
    "EP": ("mixtral", 2, EXPERTS),
    "TP x CP x EP": ("qwen3_moe", 4, {**BOTH, "mesh.expert": 2}),
    "FSDP x TP": ("llama", 4, {**BLOCKS, **SHARDED}),
    "FSDP x CP": ("mistral", 4, {**SEQUENCES, **SHARDED}),
    "FSDP x EP": ("deepseek_v3", 4, {"mesh.shard": 4, "mesh.expert": 2}),
    "TP x EP": ("gpt_oss", 4, {**BLOCKS, **SHARDED, "mesh.expert": 2}),
    "FSDP x TP x CP x EP": ("qwen3_moe", 8, {**BOTH, **SHARDED, "mesh.expert": 4}),
}
USUAL = ("TP", "CP", "EP")


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(each, marks=[] if each in USUAL else pytest.mark.long) for each in GRADIENTS],
)
def test_each_gradient_is_that_of_one_process(ranks: Pools, tmp_path: Path, mesh: str) -> None:
    family, world, axes = GRADIENTS[mesh]
    assert_gradients(ranks, family, (world, axes), tmp_path)
