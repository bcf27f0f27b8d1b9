"""Every way to spread a run gives what one plain process gives: the first law of this project.

All strategies run here on two and on four ranks with accumulation, and on one rank without.
Recompute, offload and both models are crossed with them in full where SHARDWISE_FULL_GRID is set,
which takes minutes. Otherwise each combination meets one pair of recompute and offload, in turn, so
that every pair meets a strategy; the model with tied embeddings runs on two ranks. Of the options
half run, where the full grid is not asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import Ranks
from tiny_runs import (
    SHAPE,
    Settings,
    Tally,
    Trained,
    assert_close,
    assert_same,
    on_first,
    start,
    train,
    train_plainly,
    whole_params,
)
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.facts.presets import PRESETS

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
FULL_GRID = "SHARDWISE_FULL_GRID" in os.environ
MODELS = ("tiny-llama", "tiny-qwen")
WORLDS = (1, 2, 4)
STRATEGIES: list[Settings] = [
    {"shard.strategy": "full_shard"},
    {"shard.strategy": "shard_grad_op"},
    {"shard.strategy": "no_shard"},
    {"shard.strategy": "hybrid_shard"},
]
REMAT_AND_OFFLOAD = list(product(("none", "full", "selective"), ("none", "cpu")))
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
FULL: Settings = {"shard.strategy": "full_shard"}
THREE_LAYERS: Settings = {"model.overrides": {**SHAPE, "num_hidden_layers": 3}}


@pytest.fixture(scope="module")
def plain(ranks: Pools) -> Callable[..., Trained]:
    """`plain(model, layers)`: the run of one process, computed once."""

    @cache
    def run(model: str, layers: int = 2, seed: int = 0) -> Trained:
        overrides = {**SHAPE, "num_hidden_layers": layers}
        settings = {"model.name": model, "model.overrides": overrides, "train.seed": seed}
        return ranks(1).run(train_plainly, settings)[0]

    return run


def spread(ranks: Pools, world: int, settings: Settings) -> Trained:
    return ranks(world).run(train, world, settings)[0]


def label(settings: Settings) -> str:
    return ",".join(f"{path.split('.')[-1]}={value}" for path, value in settings.items())


def pairs_for(
    model: str, strategy: Settings, world: int, accumulation: int
) -> list[tuple[str, str]]:
    """All pairs of recompute and offload, or the one whose turn it is."""
    if FULL_GRID:
        return REMAT_AND_OFFLOAD
    number = MODELS.index(model) + 2 * WORLDS.index(world) + STRATEGIES.index(strategy)
    return [REMAT_AND_OFFLOAD[(number + 3 * (accumulation > 1)) % len(REMAT_AND_OFFLOAD)]]


SAMPLE = [(MODELS[0], 1, 1), (MODELS[0], 4, 2), (MODELS[1], 2, 2)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
@pytest.mark.parametrize(
    ("model", "world", "accumulation"),
    [*product(MODELS, WORLDS, (1, 4))] if FULL_GRID else SAMPLE,
)
def test_equals_one_process(
    ranks: Pools,
    plain: Callable[..., Trained],
    tally: Tally,
    model: str,
    world: int,
    strategy: Settings,
    accumulation: int,
) -> None:
    hybrid = strategy["shard.strategy"] == "hybrid_shard"
    for remat, offload in pairs_for(model, strategy, world, accumulation):
        settings = {
            "model.name": model,
            **strategy,
            **({"mesh.replicate": min(world, 2)} if hybrid else {}),
            "train.accumulation": accumulation,
            "memory.checkpoint_activations": remat,
            "memory.offload": offload,
        }
        assert_close(spread(ranks, world, settings), plain(model), tally)


SELECTIVE = {**FULL, "memory.checkpoint_activations": "selective"}
OPTIONS: list[tuple[int, Settings]] = [
    (4, {**HYBRID, "train.accumulation": 4, "memory.accumulate": "sharded"}),
    (2, {**FULL, "memory.loss": "chunked", "memory.loss_chunk_tokens": 7}),
    (2, {**FULL, "shard.reshard_after_forward": False}),
    (4, {**FULL, "shard.reshard_after_forward": 2}),
    (2, {**FULL, "shard.forward_prefetch": 2, "shard.backward_prefetch": 2}),
    (2, {**FULL, "shard.gather_in_place": True, "memory.checkpoint_activations": "full"}),
    (4, {**HYBRID, "shard.gather_in_place": True, "train.accumulation": 4}),
    (2, {**FULL, "memory.checkpoint_activations": 0.5}),
    (2, {**SELECTIVE, "model.attention": "flash_attention_4"}),
]
MORE_OPTIONS: list[tuple[int, Settings]] = [
    (2, {**FULL, "train.accumulation": 4, "memory.accumulate": "sharded"}),
    (2, {**FULL, "memory.loss": "full"}),
    (2, {**FULL, "shard.reshard_after_forward": True}),
    (2, {**FULL, "shard.backward_prefetch": 0}),
    (2, {**FULL, "shard.all_gather_limit": 1}),
    (4, {**FULL, "shard.gather_in_place": True, "shard.reshard_after_forward": False}),
    (2, {"mesh.replicate": 2}),
    (2, {"shard.strategy": "hybrid_shard", "mesh.replicate": 2, "mesh.shard": 1}),
    (2, {**FULL, "optim.clip_norm": 1.0, "optim.fused": False}),
]


def one_model_each() -> Iterator[Any]:
    """Every option with a model, the two in turn; more of them with both in the full grid."""
    for number, (world, option) in enumerate(OPTIONS + MORE_OPTIONS * FULL_GRID):
        for model in MODELS if FULL_GRID else [MODELS[number % 2]]:
            yield pytest.param(world, option, model, id=f"{world}-{label(option)}-{model}")


@pytest.mark.parametrize(("world", "option", "model"), [*one_model_each()])
def test_an_option_changes_no_number(
    ranks: Pools,
    plain: Callable[..., Trained],
    tally: Tally,
    world: int,
    option: Settings,
    model: str,
) -> None:
    settings = {"model.name": model, **THREE_LAYERS, **option}
    assert_close(spread(ranks, world, settings), plain(model, 3), tally)


# Fewer experts than ranks that shard them, or one more: their first dim is not the one that is cut,
# except where gathered parameters are resharded to a smaller group.
EXPERTS: list[tuple[int, int, Settings]] = [
    (4, 2, FULL),
    (4, 2, {**FULL, "memory.offload": "cpu", "train.accumulation": 2}),
    *([(4, 2, {**FULL, "shard.reshard_after_forward": 2})] * FULL_GRID),
    (4, 3, {**HYBRID, "memory.checkpoint_activations": "full"}),
]


@pytest.mark.parametrize(
    ("world", "experts", "option"),
    [pytest.param(w, e, s, id=f"{w}-{e}-{label(s)}") for w, e, s in EXPERTS],
)
def test_stacked_experts_equal_one_process(
    ranks: Pools, tally: Tally, world: int, experts: int, option: Settings
) -> None:
    # Grouped matmuls want rows of whole 16 bytes.
    overrides = {**SHAPE, "intermediate_size": 68, "num_local_experts": experts}
    settings = {"model.name": "tiny-mixtral", "model.overrides": overrides, "train.steps": 3}
    reference = ranks(1).run(train_plainly, settings)[0]
    assert_close(spread(ranks, world, {**settings, **option}), reference, tally)


UNITS: list[tuple[str, Settings]] = [
    ("tiny-llama", {"shard.unit_min_params": 2000}),
    *([("tiny-llama", {"shard.unit_classes": ["LlamaDecoderLayer"]})] * FULL_GRID),
    ("tiny-llama", {"shard.unit_classes": ["LlamaAttention", "LlamaMLP"]}),
    ("tiny-qwen", {"shard.unit_classes": ["Qwen2DecoderLayer"]}),
    *([("tiny-qwen", {"shard.unit_classes": ["Qwen2MLP"]})] * FULL_GRID),
]


@pytest.mark.parametrize(
    ("model", "units"), [pytest.param(m, u, id=f"{m}-{label(u)}") for m, u in UNITS]
)
def test_named_units_equal_one_process(
    ranks: Pools, plain: Callable[..., Trained], tally: Tally, model: str, units: Settings
) -> None:
    settings = {"model.name": model, **THREE_LAYERS, **FULL, **units}
    assert_close(spread(ranks, 2, settings), plain(model, 3), tally)


def test_units_by_size_keep_tied_embeddings_together(ranks: Pools, tally: Tally) -> None:
    settings = {"model.name": "tiny-qwen", **THREE_LAYERS, **FULL, "shard.unit_min_params": 2000}
    reference = ranks(1).run(train_plainly, settings)[0]
    assert_close(spread(ranks, 2, settings), reference, tally)


# ---- seeds and first weights -----------------------------------------------------------------


def first_params(world: int, settings: Settings) -> Any:
    return on_first(whole_params(start(world, settings).model))


@pytest.mark.parametrize("model", MODELS if FULL_GRID else MODELS[1:])
def test_first_weights_are_the_same_for_every_mesh(ranks: Pools, model: str) -> None:
    expected = ranks(1).run(first_params, 1, {"model.name": model})[0]
    for world, strategy in [(2, FULL), (2, {"shard.strategy": "no_shard"}), (4, FULL), (4, HYBRID)]:
        found = ranks(world).run(first_params, world, {"model.name": model, **strategy})[0]
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_first_weights_do_not_depend_on_the_units(ranks: Pools) -> None:
    expected = ranks(1).run(first_params, 1, FULL)[0]
    found = ranks(1).run(first_params, 1, {**FULL, "shard.unit_min_params": 2000})[0]
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("model", MODELS if FULL_GRID else MODELS[:1])
def test_a_seed_decides_every_bit(ranks: Pools, model: str) -> None:
    settings = {"model.name": model, **FULL}
    once = spread(ranks, 2, settings)
    assert_same(spread(ranks, 2, settings), once)
    other = spread(ranks, 2, {**settings, "train.seed": 1})
    assert all(a != b for a, b in zip(other.losses, once.losses, strict=True))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(other.params[name], once.params[name])


# ---- pretrained weights ----------------------------------------------------------------------


def save_model(directory: Path, model: str, dtype: torch.dtype, shard_size: str) -> dict[str, Any]:
    """A Hugging Face directory with random weights; returns them as fp32."""
    config = AutoConfig.for_model(**{**PRESETS[model], **SHAPE})
    saved = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for param in saved.parameters():
            param.normal_(std=0.1)
    saved.save_pretrained(directory, max_shard_size=shard_size)
    return {name: param.detach().float().numpy() for name, param in saved.named_parameters()}


@pytest.mark.parametrize(
    ("model", "dtype", "shard_size"),
    [(MODELS[0], torch.float32, "80KB"), (MODELS[1], torch.bfloat16, "50GB")],
)
def test_pretrained_weights_arrive_bit_for_bit(
    ranks: Pools, tmp_path: Path, model: str, dtype: torch.dtype, shard_size: str
) -> None:
    expected = save_model(tmp_path, model, dtype, shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) >= (1 if shard_size == "50GB" else 2)
    settings = {"model.name": str(tmp_path), "model.overrides": {}, "model.weights": "pretrained"}
    for world, strategy in [(2, FULL), (2, {"shard.strategy": "no_shard"}), (4, HYBRID)]:
        found = ranks(world).run(first_params, world, {**settings, **strategy})[0]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert np.array_equal(found[name], value), name
