"""How transformers reads the files of a family that stores its experts apart."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.internals.weight_conversions import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    revert_weight_conversion,
)

SIZES = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 11, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}


def mixture(device: str) -> Any:
    config = AutoConfig.for_model("mixtral", **SIZES, **HEADS, num_local_experts=2)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def test_experts_are_merged_and_halves_are_joined() -> None:
    found = get_model_conversion_mapping(mixture("meta"))
    assert all(isinstance(entry, WeightConverter | WeightRenaming) for entry in found)
    converters = [entry for entry in found if isinstance(entry, WeightConverter)]
    steps = [[type(step) for step in converter.operations] for converter in converters]
    assert [MergeModulelist, Concatenate] in steps
    key = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    for renaming in found:
        if isinstance(renaming, WeightRenaming):
            key, _ = renaming.rename_source_key(key)
    targets = [target for c in converters for target, hit in [c.rename_source_key(key)] if hit]
    assert targets == ["model.layers.0.mlp.experts.gate_up_proj"]


def test_experts_are_written_apart_again() -> None:
    model = mixture("cpu")
    names = set(revert_weight_conversion(model, dict(model.state_dict())))
    assert "model.layers.0.block_sparse_moe.experts.1.w1.weight" in names


def test_numbers_in_names_are_sorted_as_numbers() -> None:
    names = ["layers.10.w", "layers.9.w", "layers.1.w"]
    assert sorted(names, key=dot_natural_key) == ["layers.1.w", "layers.9.w", "layers.10.w"]
