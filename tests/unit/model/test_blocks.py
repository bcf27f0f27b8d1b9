from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ExitCode, UserError
from shardwise.facts.families import spec_from_config
from shardwise.facts.presets import PRESETS
from shardwise.model.blocks import UnitMap, find_units, iter_modules
from shardwise.model.build import build_on_meta

TINY = ("tiny-llama", "tiny-qwen", "tiny-gpt2", "tiny-mixtral")


def units_of(preset: str, **how: Any) -> UnitMap:
    return find_units(build_on_meta(PRESETS[preset]), **how)


def names_of(units: UnitMap) -> list[str]:
    return [unit.name for unit in units.units]


def blocks_named(prefix: str) -> list[str]:
    return [f"{prefix}.{index}" for index in range(4)]


@pytest.mark.parametrize(
    ("preset", "first", "prefix", "last"),
    [
        ("tiny-llama", ["model.embed_tokens"], "model.layers", ["[norm, lm_head]"]),
        ("tiny-mixtral", ["model.embed_tokens"], "model.layers", ["[norm, lm_head]"]),
        ("tiny-qwen", ["[embed_tokens, norm, lm_head]"], "model.layers", []),
        ("tiny-gpt2", ["[wte, ln_f, lm_head]", "transformer.wpe"], "transformer.h", []),
    ],
)
def test_units_of_the_families(preset: str, first: list[str], prefix: str, last: list[str]) -> None:
    units = units_of(preset)
    assert names_of(units) == [*first, *blocks_named(prefix), *last]
    assert [unit.name for unit in units.blocks] == blocks_named(prefix)
    assert units.root_params == 0


@pytest.mark.parametrize("preset", TINY)
def test_units_hold_all_parameters_once(preset: str) -> None:
    units = units_of(preset)
    spec = spec_from_config(preset, PRESETS[preset])
    assert sum(unit.num_params for unit in units.units) == spec.total_params
    assert {unit.num_params for unit in units.blocks} == {spec.block_params}


def test_units_say_how_they_were_found() -> None:
    assert "LlamaDecoderLayer" in units_of("tiny-llama").found_by
    assert "unit_classes" in units_of("tiny-llama", classes=["LlamaMLP"]).found_by
    assert "150000" in units_of("tiny-llama", min_params=150_000).found_by


def test_units_by_class() -> None:
    by_layer = units_of("tiny-llama", classes=["LlamaDecoderLayer"])
    assert names_of(by_layer) == names_of(units_of("tiny-llama"))
    parts = units_of("tiny-llama", classes=["LlamaAttention", "LlamaMLP"])
    assert len(parts.blocks) == 8
    assert parts.blocks[0].name == "model.layers.0.self_attn"
    assert parts.root_params == 9 * 128  # the norms


def test_an_outer_class_hides_an_inner_one() -> None:
    units = units_of("tiny-llama", classes=["LlamaDecoderLayer", "LlamaMLP"])
    assert [unit.name for unit in units.blocks] == blocks_named("model.layers")


def test_units_by_size() -> None:
    by_layer = units_of("tiny-llama", min_params=150_000)
    assert [unit.name for unit in by_layer.blocks] == blocks_named("model.layers")
    by_mlp = units_of("tiny-llama", min_params=100_000)
    assert [unit.name for unit in by_mlp.blocks][:4] == [
        f"model.layers.{index}.mlp" for index in range(4)
    ]
    total = sum(unit.num_params for unit in by_mlp.units) + by_mlp.root_params
    assert total == spec_from_config("tiny-llama", PRESETS["tiny-llama"]).total_params


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="no module of class 'LlamaDecoderLayr'") as caught:
        units_of("tiny-llama", classes=["LlamaDecoderLayr"])
    assert "LlamaDecoderLayer" in caught.value.fix


@pytest.mark.parametrize("how", [{"classes": ["LlamaModel"]}, {"min_params": 10**9}])
def test_fewer_than_two_units_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="at least 2 are needed") as caught:
        units_of("tiny-llama", **how)
    assert caught.value.code == ExitCode.CONFIG
    assert "one all-gather" in caught.value.why
    assert "shard.unit_classes" in caught.value.fix
    assert "LlamaDecoderLayer" in caught.value.fix


def test_a_model_without_lists_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(UserError, match="found 0 units in Sequential") as caught:
        find_units(model)
    assert "shard.unit_classes" in caught.value.fix


def test_modules_of_a_unit_are_the_models_own() -> None:
    model = build_on_meta(PRESETS["tiny-llama"])
    last = find_units(model).units[-1]
    assert list(iter_modules(model, last)) == [model.model.norm, model.lm_head]
