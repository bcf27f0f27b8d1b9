"""Adapters on any mesh learn what they learn in one process without FSDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted_runs import start_moved, train_adapted, train_adapted_plainly
from rank_pool import Ranks
from safetensors.torch import load_file
from tiny_families import save_model, tiny_config
from tiny_runs import Settings, Tally, Trained, assert_close, run_steps
from transformers import CONFIG_MAPPING

from quantised_models import read_all, save_both
from shardwise.kernels import float8_rows
from shardwise.kernels.nf4 import pack
from shardwise.kernels.packed_rows import floats_of

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
LORA: Settings = {"adapter.method": "lora", "adapter.rank": 4, "adapter.alpha": 6.0}
FULL: Settings = {"shard.strategy": "full_shard"}
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
# A block is a block to frozen weights, and a mixture a mixture: `make test` has one of each.
FAMILIES = (
    *("qwen3", "qwen3_moe"),
    *(pytest.param(family, marks=pytest.mark.long) for family in ("gemma3_text", "mixtral")),
)
MESHES: list[tuple[int, Settings]] = [(2, FULL), (4, HYBRID)]
# A run of four ranks takes two CPU seconds, so `make test` has some with one mesh only.
ALL_MESHES = "SHARDWISE_FULL_GRID" in os.environ
ON_TWO, ON_FOUR = (MESHES, MESHES) if ALL_MESHES else (MESHES[:1], MESHES[1:])
EXPERT_PARALLEL: Settings = {"mesh.shard": 2, "mesh.expert": 2}
OPTIONS: list[Any] = [
    (1, {}),
    (2, {**FULL, "memory.checkpoint_activations": "full", "train.accumulation": 2}),
    (2, {**FULL, "memory.checkpoint_activations": "selective", "memory.offload": "cpu"}),
    (2, {"shard.strategy": "no_shard", "memory.loss": "full"}),
    (4, {**FULL, "shard.gather_in_place": True, "shard.reshard_after_forward": False}),
    pytest.param(
        4,
        {**HYBRID, "train.accumulation": 4, "memory.accumulate": "sharded"},
        marks=pytest.mark.long,
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Settings]:
    """`models(family)`: settings of a tiny model of that family, made once."""
    made: dict[str, Settings] = {}

    def make(family: str) -> Settings:
        if family not in made:
            place = tmp_path_factory.mktemp(family)
            save_model(tiny_config(family), place)
            made[family] = {"model.name": str(place), "model.overrides": {}}
        return made[family]

    return make


@pytest.fixture(scope="module")
def llama(ranks: Pools) -> Trained:
    reference: Trained = ranks(1).run(train_adapted_plainly, LORA)[0]
    return reference


def spread(ranks: Pools, world: int, settings: Settings) -> Trained:
    found: Trained = ranks(world).run(train_adapted, world, settings)[0]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_families_learn_as_in_one_process(
    ranks: Pools, tally: Tally, models: Callable[[str], Settings], family: str
) -> None:
    settings = {**LORA, **models(family), "train.steps": 2}
    reference = ranks(1).run(train_adapted_plainly, settings)[0]
    for world, mesh in ON_FOUR if family == "qwen3" else ON_TWO:
        assert_close(spread(ranks, world, {**settings, **mesh}), reference, tally)


@pytest.mark.parametrize(("world", "option"), OPTIONS)
def test_an_option_changes_no_number(
    ranks: Pools, tally: Tally, llama: Trained, world: int, option: Settings
) -> None:
    assert_close(spread(ranks, world, {**LORA, **option}), llama, tally)


def train_in_bf16(world: int, settings: Settings) -> Any:
    """On every rank: the losses of a run, after a look at the formats."""
    session = start_moved(world, settings)
    formats = {(p.requires_grad, p.dtype) for p in session.model.parameters()}
    assert formats == {(False, torch.bfloat16), (True, torch.float32)}
    trained = run_steps(session, range(session.plan.config.train.steps))
    return trained and trained.losses


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_frozen_weights_are_stored_as_they_are_computed_with(
    ranks: Pools, llama: Trained, world: int
) -> None:
    """bf16 weights and fp32 adapters are in one unit of FSDP2."""
    settings = {**LORA, **FULL, "precision.param": "bf16"}
    losses = ranks(world).run(train_in_bf16, world, settings)[0]
    assert losses == pytest.approx(llama.losses, rel=1e-3)


def test_some_layers_and_another_scale(ranks: Pools, tally: Tally) -> None:
    some: dict[str, Any] = {"adapter.targets": ["q_proj", "*.mlp.*"], "adapter.rslora": True}
    settings = {**LORA, **some, "model.name": "tiny-qwen"}
    reference = ranks(1).run(train_adapted_plainly, settings)[0]
    adapted = {name.split(".")[-2] for name in reference.params if name.endswith("lora_A")}
    assert adapted == {"q_proj", "gate_proj", "up_proj", "down_proj"}
    assert_close(spread(ranks, 2, {**settings, **FULL}), reference, tally)


@pytest.mark.parametrize(
    ("model", "tied"),
    [pytest.param("tiny-llama", False, marks=pytest.mark.long), ("tiny-qwen", True)],
)
def test_modules_that_are_trained_whole(ranks: Pools, tally: Tally, model: str, tied: bool) -> None:
    """Tied or not, with the head in the chunked loss, sharded and used in place."""
    settings = {**LORA, "model.name": model, "adapter.modules_to_save": ["lm_head", "*norm"]}
    reference = ranks(1).run(train_adapted_plainly, {**settings, "train.steps": 2})[0]
    assert ("lm_head.weight" in reference.params) is not tied
    for world, mesh in [(1, {}), *(MESHES if tied else ON_TWO)]:
        found = spread(ranks, world, {**settings, "train.steps": 2, **mesh})
        assert_close(found, reference, tally)


def test_dora_learns_as_in_one_process(ranks: Pools, tally: Tally) -> None:
    settings = {**LORA, "adapter.dora": True, "model.name": "tiny-qwen"}
    reference = ranks(1).run(train_adapted_plainly, settings)[0]
    found = [name for name in reference.params if name.endswith("lora_magnitude")]
    assert len(found) == 2 * 7
    for world, mesh in [*([(1, FULL)] if ALL_MESHES else []), *MESHES]:
        assert_close(spread(ranks, world, {**settings, **mesh}), reference, tally)


# With seed 0 a token of Mixtral has a second and a third expert in step 2 that differ by 6e-8, so
# that rounding decides.
EXPERTS: Settings = {
    "adapter.targets": ["all-linear", "experts.*"],
    "adapter.rank": 8,
    "train.seed": 1,
}


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", pytest.param("mixtral", marks=pytest.mark.long)]
)
def test_experts_learn_as_in_one_process(
    ranks: Pools, tally: Tally, models: Callable[[str], Settings], family: str
) -> None:
    settings = {**LORA, **EXPERTS, **models(family), "train.steps": 2}
    reference = ranks(1).run(train_adapted_plainly, settings)[0]
    assert any(name.endswith("experts.gate_up_proj_lora_A") for name in reference.params)
    meshes = ON_TWO if family == "gpt_oss" else ON_FOUR
    for world, mesh in [*meshes, (2, EXPERT_PARALLEL)]:
        remat = {"memory.checkpoint_activations": "full" if world == 2 else "none"}
        assert_close(spread(ranks, world, {**settings, **mesh, **remat}), reference, tally)


# Over weights in NF4 the reference is plain PyTorch over the same weights as floats. Six rows of
# k_proj are shared out unevenly, and one of four ranks has none.
NF4: Settings = {
    "model.overrides": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "vocab_size": 301,
    },
    "adapter.method": "lora",
    "adapter.base": "nf4",
    "adapter.rank": 8,
    "train.steps": 2,
}
NF4_OPTIONS: list[tuple[int, Settings]] = [
    (1, {}),
    (2, {**FULL, "memory.checkpoint_activations": "full", "train.accumulation": 2}),
    (2, {**FULL, "memory.checkpoint_activations": "selective", "memory.offload": "cpu"}),
    (4, {**FULL, "shard.gather_in_place": True, "shard.reshard_after_forward": False}),
    (4, HYBRID),
]
# Experts with adapters and without.
ALL: Settings = {"adapter.targets": ["all-linear", "experts.*"], "train.seed": 1}
NF4_FAMILIES = [
    ("qwen3", {}, ON_TWO),
    pytest.param("gemma3_text", {}, ON_FOUR, marks=pytest.mark.long),
    pytest.param("qwen3_moe", {}, ON_FOUR, marks=pytest.mark.long),
    ("mixtral", ALL, MESHES),
]
WIDE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16}


def assert_nf4(
    ranks: Pools, meshes: list[tuple[int, Settings]], settings: Settings, tally: Tally
) -> Trained:
    """Also that bytes are the same on every mesh, before the steps and after them."""
    reference: Trained = ranks(1).run(train_adapted_plainly, settings)[0]
    packed = [name for name in reference.params if name.endswith("_proj.weight")]
    assert packed
    for world, mesh in meshes:
        found = spread(ranks, world, {**settings, **mesh})
        assert_close(found, reference, tally)
        for name in packed:
            assert np.array_equal(found.params[name], reference.params[name]), name
    return reference


def test_no_option_changes_numbers_over_nf4(ranks: Pools, tally: Tally) -> None:
    assert_nf4(ranks, NF4_OPTIONS[1::2], NF4, tally)


@pytest.mark.long
def test_no_other_option_changes_numbers_over_nf4(ranks: Pools, tally: Tally) -> None:
    assert_nf4(ranks, NF4_OPTIONS[::2], NF4, tally)


@pytest.mark.parametrize("base", [pytest.param("nf4", marks=pytest.mark.long), "float8"])
def test_dora_learns_over_packed_weights(ranks: Pools, tally: Tally, base: str) -> None:
    meshes = ON_TWO if base == "nf4" else ON_FOUR
    assert_nf4(ranks, meshes, {**NF4, "adapter.base": base, "adapter.dora": True}, tally)


@pytest.mark.parametrize(("family", "more", "meshes"), NF4_FAMILIES)
def test_families_learn_over_nf4(
    ranks: Pools,
    tally: Tally,
    tmp_path: Path,
    family: str,
    more: Settings,
    meshes: list[tuple[int, Settings]],
) -> None:
    """The weights come from files, of which each rank reads and quantises its own rows."""
    known = CONFIG_MAPPING[family]().to_dict()
    save_model(tiny_config(family, {n: v for n, v in WIDE.items() if n in known}), tmp_path)
    place = {"model.name": str(tmp_path), "model.overrides": {}}
    reference = assert_nf4(ranks, meshes, {**NF4, **more, **place}, tally)
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("_proj.weight") and name in reference.params:
            assert np.array_equal(reference.params[name], pack(weight).numpy()), name


# One byte for each weight: made floats as NF4 is, or multiplied as it is, which ranks emulate.
FLOAT8: Settings = {**NF4, "adapter.base": "float8"}
MULTIPLIED: Settings = {**FLOAT8, "model.overrides": {**NF4["model.overrides"], "head_dim": 16}}
FLOAT8_OPTIONS: list[tuple[int, Settings]] = [
    (2, {**FULL, "memory.checkpoint_activations": "selective", "train.accumulation": 2}),
    (4, {**HYBRID, "memory.offload": "cpu"}),
]


@pytest.mark.long
def test_no_option_changes_numbers_over_float8(ranks: Pools, tally: Tally, tmp_path: Path) -> None:
    save_model(tiny_config("mixtral", WIDE), tmp_path)
    place = {"model.name": str(tmp_path), "model.overrides": {}}
    meshes = [*FLOAT8_OPTIONS, (2, EXPERT_PARALLEL)]
    reference = assert_nf4(ranks, meshes, {**FLOAT8, **ALL, **place}, tally)
    name = "model.layers.1.self_attn.q_proj.weight"
    stored = load_file(tmp_path / "model.safetensors")[name]
    assert np.array_equal(reference.params[name], float8_rows.pack(stored).numpy())


def test_float8_is_multiplied_alike_on_every_mesh(ranks: Pools) -> None:
    exact = ranks(1).run(train_adapted_plainly, MULTIPLIED)[0]
    alone, *others = (
        spread(ranks, world, {**MULTIPLIED, "cluster.name": f"{world}xH200", **mesh})
        for world, mesh in [(1, {}), *FLOAT8_OPTIONS]
    )
    assert alone.losses != exact.losses
    assert alone.losses == pytest.approx(exact.losses, rel=5e-3)
    assert alone.norms == pytest.approx(exact.norms, rel=5e-2)
    for found in others:
        # Scales are powers of two, so what shares a batch hardly matters.
        assert found.losses == pytest.approx(alone.losses, rel=1e-4)
        assert found.norms[0] == pytest.approx(alone.norms[0], rel=2e-3)
        # Adam's first update is nearly the signs of gradients, so where a gradient is rounding
        # noise, the order of sums decides: the CPU's library has a say in the norms after it.
        assert found.norms == pytest.approx(alone.norms, rel=5e-2)
        for name, value in alone.params.items():
            if name.endswith("_proj.weight"):
                assert np.array_equal(found.params[name], value), name


@pytest.mark.parametrize("base", ["float8", pytest.param("nf4", marks=pytest.mark.long)])
def test_clamped_experts_that_ship_in_mxfp4(
    ranks: Pools, tally: Tally, tmp_path: Path, base: str
) -> None:
    """One byte holds each of MXFP4's values exactly, so nothing is lost on the way from files."""
    save_both("gpt_oss", tmp_path / "shipped", tmp_path / "plain")
    place = {"model.name": str(tmp_path / "shipped"), "model.overrides": {}}
    settings = {**NF4, **place, "adapter.base": base, **(ALL if base == "float8" else {})}
    reference = assert_nf4(ranks, [(2, FULL), (2, EXPERT_PARALLEL)], settings, tally)
    name = "model.layers.1.mlp.experts.down_proj"
    dtype = {"float8": torch.int8, "nf4": torch.uint8}[base]
    floats = floats_of(torch.from_numpy(reference.params[name]).to(dtype), torch.float32)
    assert torch.equal(floats, read_all(tmp_path / "plain")[name]) is (base == "float8")
