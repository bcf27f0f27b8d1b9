"""Adapters over weights in NF4 learn on any mesh what they learn in one process over the same
weights as floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapted_runs import train_adapted, train_adapted_plainly
from rank_pool import Ranks
from safetensors.torch import load_file
from tiny_families import save_model, tiny_config
from tiny_runs import Settings, Tally, Trained, assert_close
from transformers import CONFIG_MAPPING

from shardwise.kernels.nf4 import pack

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
# Six rows of k_proj are shared out unevenly, and one of four ranks has none.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "vocab_size": 301,
}
NF4: Settings = {
    "model.overrides": SHAPE,
    "adapter.method": "lora",
    "adapter.base": "nf4",
    "adapter.rank": 8,
    "train.steps": 2,
}
FULL: Settings = {"shard.strategy": "full_shard"}
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
OPTIONS: list[tuple[int, Settings]] = [
    (1, {}),
    (2, {**FULL, "memory.checkpoint_activations": "full", "train.accumulation": 2}),
    (2, {**FULL, "memory.checkpoint_activations": "selective", "memory.offload": "cpu"}),
    (2, {"shard.strategy": "no_shard"}),
    (4, {**FULL, "shard.gather_in_place": True, "shard.reshard_after_forward": False}),
    (4, HYBRID),
]


@pytest.fixture(scope="module")
def llama(ranks: Pools) -> Trained:
    reference: Trained = ranks(1).run(train_adapted_plainly, NF4)[0]
    return reference


def assert_learned(
    ranks: Pools, world: int, settings: Settings, reference: Trained, tally: Tally
) -> None:
    found: Trained = ranks(world).run(train_adapted, world, settings)[0]
    assert_close(found, reference, tally)
    packed = [name for name in reference.params if name.endswith("_proj.weight")]
    assert packed
    for name in packed:
        assert np.array_equal(found.params[name], reference.params[name]), name


@pytest.mark.parametrize(("world", "option"), OPTIONS)
def test_a_mesh_or_an_option_changes_no_number(
    ranks: Pools, tally: Tally, llama: Trained, world: int, option: Settings
) -> None:
    assert_learned(ranks, world, {**NF4, **option}, llama, tally)


WIDE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16}
# The first two have experts without adapters. Their dim of experts is not cut evenly by three.
FAMILIES: list[tuple[str, Settings]] = [
    ("qwen3", {}),
    ("gemma3_text", {}),
    ("qwen3_moe", {}),
    ("mixtral", {"adapter.targets": ["all-linear", "experts.*"], "train.seed": 1}),
]


@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_families_learn_as_in_one_process(
    ranks: Pools, tally: Tally, tmp_path: Path, family: str, more: Settings
) -> None:
    """The weights come from files, of which each rank reads and quantises its own rows."""
    known = CONFIG_MAPPING[family]().to_dict()
    save_model(tiny_config(family, {n: v for n, v in WIDE.items() if n in known}), tmp_path)
    settings = {**NF4, **more, "model.name": str(tmp_path), "model.overrides": {}}
    reference = ranks(1).run(train_adapted_plainly, settings)[0]
    files = load_file(tmp_path / "model.safetensors")
    for name, weight in files.items():
        if name.endswith("_proj.weight") and name in reference.params:
            assert np.array_equal(reference.params[name], pack(weight).numpy()), name
    for world, mesh in [(2, FULL), (4, HYBRID)]:
        assert_learned(ranks, world, {**settings, **mesh}, reference, tally)
