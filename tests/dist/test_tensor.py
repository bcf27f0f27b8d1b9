"""Ranks that compute each block together give what one process gives.

A sample runs always. Every family on every mesh runs with `make chaos`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapted_runs import train_adapted, train_adapted_plainly
from family_runs import HEADER, compare
from rank_pool import Ranks
from tiny_runs import (
    SHAPE,
    Settings,
    Tally,
    Trained,
    assert_close,
    run_steps,
    start,
    train,
    train_plainly,
    whole_params,
)

from shardwise.errors import UserError
from shardwise.model.copies import shares_of
from shardwise.model.cuts import cuts_of
from shardwise.parallel.torchao_float8 import own_part
from shardwise.plan.tensor_suits import FAMILIES
from shardwise.training.copied_gradients import GradientSums
from shardwise.training.replicas import Replicas
from shardwise.training.session import build_loader
from shardwise.training.step import Stepper

pytestmark = pytest.mark.dist
Pools = Callable[[int], Ranks]

TENSOR: Settings = {"mesh.tensor": 2}
ALL_TOKENS: Settings = {**TENSOR, "mesh.sequence_parallel": False}
SHARDED: Settings = {**TENSOR, "shard.strategy": "full_shard"}
HYBRID: Settings = {**TENSOR, "mesh.replicate": 2, "mesh.shard": 2}
MESHES: list[tuple[int, Settings]] = [
    (2, TENSOR),
    (2, ALL_TOKENS),
    (4, SHARDED),
    (4, {**ALL_TOKENS, "shard.strategy": "full_shard"}),
    (4, {**TENSOR, "mesh.replicate": 2, "mesh.shard": 1}),
    (8, HYBRID),
]
# The heads of the tiny models divide over two ranks, and those of these over four.
FOUR = {**SHAPE, "num_key_value_heads": 4, "intermediate_size": 68}
HEAD_NORMS: Settings = {"model.name": "qwen3-8b", "model.overrides": {**SHAPE, "head_dim": 8}}
OPTIONS: list[Any] = [
    ("tiny-llama", 2, {**TENSOR, "memory.checkpoint_activations": "selective"}),
    ("tiny-qwen", 2, {**ALL_TOKENS, "memory.checkpoint_activations": "full"}),
    ("tiny-qwen", 4, SHARDED),
    ("tiny-llama", 2, {**TENSOR, "memory.offload": "cpu", "train.accumulation": 2}),
    ("tiny-llama", 2, {**TENSOR, "memory.loss": "full", "optim.clip_norm": 0.5}),
    pytest.param(
        *("tiny-llama", 4, {**SHARDED, "memory.loss_chunk_tokens": 7, "optim.fused": False}),
        marks=pytest.mark.long,
    ),
    ("qwen3-8b", 4, {**HYBRID, **HEAD_NORMS, "mesh.shard": 1, "train.accumulation": 2}),
    pytest.param(
        "tiny-llama", 4, {"mesh.tensor": 4, "model.overrides": FOUR}, marks=pytest.mark.long
    ),
]


def label(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ",".join(f"{path.split('.')[-1]}={each}" for path, each in value.items() if each != FOUR)


@pytest.mark.parametrize(("model", "world", "settings"), OPTIONS, ids=label)
def test_equals_one_process(
    ranks: Pools, tally: Tally, model: str, world: int, settings: Settings
) -> None:
    wanted = {"model.name": model, **settings}
    shape = {"model.overrides": settings.get("model.overrides", SHAPE)}
    clip = {path: settings[path] for path in ("optim.clip_norm",) if path in settings}
    plain: Trained = ranks(1).run(train_plainly, {"model.name": model, **shape, **clip})[0]
    assert_close(ranks(world).run(train, world, wanted)[0], plain, tally)


@pytest.mark.parametrize(
    ("family", "world", "settings"),
    [
        ("gpt_oss", 2, ALL_TOKENS),
        pytest.param("deepseek_v3", 4, SHARDED, marks=pytest.mark.long),
        ("qwen3_moe", 2, {**TENSOR, "mesh.expert": 2}),
        pytest.param("deepseek_v3", 4, {**SHARDED, "mesh.expert": 4}, marks=pytest.mark.long),
    ],
    ids=label,
)
def test_a_family_trains_as_one_process_trains_it(
    ranks: Pools, tmp_path: Path, family: str, world: int, settings: Settings
) -> None:
    wanted = {"shard.strategy": "auto", **settings}
    found = compare(ranks(world), family, tmp_path, wanted)
    assert found.is_equal, f"\n{HEADER}\n{found.row()}"


DEALT: list[tuple[str, int, Settings]] = [
    ("gpt_oss", 4, {**SHARDED, "mesh.expert": 2}),
    ("mixtral", 4, {**TENSOR, "mesh.replicate": 2, "mesh.shard": 1, "mesh.expert": 2}),
    ("glm4_moe", 4, {**SHARDED, "mesh.expert": 4, "memory.checkpoint_activations": "selective"}),
    ("qwen3_moe", 8, {**HYBRID, "mesh.expert": 4, "train.accumulation": 1}),
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "world", "settings"), DEALT, ids=label)
def test_experts_are_dealt_out_beside_it(
    ranks: Pools, tmp_path: Path, family: str, world: int, settings: Settings
) -> None:
    found = compare(ranks(world), family, tmp_path, {"shard.strategy": "auto", **settings})
    assert found.is_equal, f"\n{HEADER}\n{found.row()}"


LORA: Settings = {"adapter.method": "lora", "adapter.rank": 4, "adapter.alpha": 6.0}
ADAPTED: list[Any] = [
    (2, {**ALL_TOKENS, "memory.checkpoint_activations": "full"}),
    pytest.param(
        4, {**SHARDED, "adapter.modules_to_save": ["lm_head", "*norm"]}, marks=pytest.mark.long
    ),
]


@pytest.mark.parametrize(("world", "settings"), ADAPTED, ids=label)
def test_adapters_learn_as_in_one_process(
    ranks: Pools, tally: Tally, world: int, settings: Settings
) -> None:
    wanted = {**LORA, **settings}
    whole = {path: wanted[path] for path in wanted if path.startswith("adapter.")}
    plain = ranks(1).run(train_adapted_plainly, whole)[0]
    assert_close(ranks(world).run(train_adapted, world, wanted)[0], plain, tally)


def test_adapters_of_stacked_experts_are_refused(ranks: Pools) -> None:
    wanted = {"model.name": "tiny-mixtral", **LORA, "adapter.targets": ["*.experts.*"], **TENSOR}
    wanted |= {"model.overrides": {**SHAPE, "intermediate_size": 64}, "adapter.rank": 8}
    for said in ranks(2).run(refusal_of, wanted):
        assert said.startswith("mesh.tensor=2 does not suit adapters of stacked experts")
        assert "only adapters of linear layers are divided" in said


def refusal_of(settings: Settings) -> str:
    try:
        start(2, settings)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.parametrize(("world", "settings"), MESHES, ids=label)
def test_every_family_on_every_mesh(
    ranks: Pools, tmp_path: Path, world: int, settings: Settings
) -> None:
    wanted = {"shard.strategy": "auto", **settings}
    rows = [compare(ranks(world), each, tmp_path / each, wanted) for each in FAMILIES]
    print("\n".join(["", HEADER, *(row.row() for row in rows)]))
    assert all(row.is_equal for row in rows)


def copies_of(model: Any) -> dict[str, torch.Tensor]:
    """What this rank has of the parameters that no axis cuts."""
    cuts = cuts_of(model)
    named = model.named_parameters()
    return {name: own_part(param).clone() for name, param in named if name not in cuts}


def train_for_long(world: int, settings: Settings, num_steps: int) -> tuple[list[str], list[str]]:
    """On every rank: parameters that the first step left as they were, and copies that differ after
    the last."""
    session = start(world, settings)
    before = whole_params(session.model)
    run_steps(session, range(1))
    after = whole_params(session.model)
    same = [name for name, value in before.items() if (value == after[name]).all()]
    replicas = Replicas(session.model, session.optimizer, session.mesh)
    run_steps(session, range(1, num_steps))
    replicas.compare(num_steps)
    replicas.settle()
    every: list[Any] = [None] * world
    group = session.mesh.group("tensor")
    along = [None] * session.mesh.axes.tensor
    dist.all_gather_object(along, copies_of(session.model), group=group)
    dist.all_gather_object(every, sorted(copies_of(session.model)))
    first: dict[str, torch.Tensor] = along[0]  # type: ignore[assignment]
    differ = [
        name for each in along[1:] for name, value in each.items() if not value.equal(first[name])
    ]
    assert len(first) >= 5 and all(names == every[0] for names in every)
    return same, differ


@pytest.mark.parametrize(
    ("world", "settings"),
    [(2, TENSOR), *(pytest.param(*mesh, marks=pytest.mark.long) for mesh in MESHES[1:])],
    ids=label,
)
def test_copies_stay_equal_and_every_parameter_learns(
    ranks: Pools, world: int, settings: Settings
) -> None:
    steps = 50 if "SHARDWISE_CHAOS" in os.environ else 20
    wanted = {**HEAD_NORMS, "train.steps": steps, "data.seq_len": 8, **settings}
    for same, differ in ranks(world).run(train_for_long, world, wanted, steps):
        assert same == [] and differ == []


def find_a_changed_copy(settings: Settings) -> str:
    """On every rank: one bit of a norm changes on rank 1."""
    session = start(2, settings)
    replicas = Replicas(session.model, session.optimizer, session.mesh)
    replicas.compare(0)
    replicas.settle()
    name = "model.layers.1.input_layernorm.weight"
    if dist.get_rank() == 1:
        local = dict(session.model.named_parameters())[name].to_local()
        local.view(torch.int32)[3] ^= 1
    replicas.compare(1)
    try:
        replicas.settle()
    except UserError as error:
        return str(error)
    return ""


def test_a_copy_that_differs_is_named(ranks: Pools) -> None:
    for said in ranks(2).run(find_a_changed_copy, {"model.name": "tiny-llama", **TENSOR}):
        assert "holds other bits of model.layers.1.input_layernorm.weight" in said


def sums_of_bf16(settings: Settings) -> tuple[float, float]:
    """On every rank: how far the sums of copies' gradients are from those of the ranks' own parts,
    and how far sums in bf16 would be."""
    session = start(2, settings)
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    batches = build_loader(session).step_batches(0)
    stepper.sums.reduce = lambda: None  # type: ignore[method-assign]
    stepper._accumulate(batches, torch.tensor(256))
    shares = shares_of(session.model)
    parts = [own_part(param.grad) * share for param, share in shares.items()]
    both: list[Any] = [None, None]
    dist.all_gather_object(both, parts)
    GradientSums(session.model, session.mesh, session.device).reduce()
    apart = narrow = 0.0
    for param, one, two in zip(shares, *both, strict=True):
        exact = one.double() + two.double()
        in_bf16 = (one.bfloat16() + two.bfloat16()).double()
        apart = max(apart, float((own_part(param.grad).double() - exact).norm() / exact.norm()))
        narrow = max(narrow, float((in_bf16 - exact).norm() / exact.norm()))
    return apart, narrow


def test_gradients_of_copies_are_summed_in_fp32(ranks: Pools) -> None:
    wanted = {"model.name": "tiny-llama", "precision.param": "bf16", **TENSOR}
    for apart, narrow in ranks(2).run(sums_of_bf16, wanted):
        assert apart < 1e-7
        assert narrow > 1e-3, "the same sums in bf16 would be wrong"


@pytest.mark.skipif("SHARDWISE_FULL_GRID" not in os.environ, reason="compiles blocks")
def test_compiled_blocks_equal_one_process(ranks: Pools, tally: Tally) -> None:
    wanted = {"model.name": "tiny-llama", "memory.compile": True, **TENSOR}
    plain = ranks(1).run(train_plainly, {"model.name": "tiny-llama"})[0]
    assert_close(ranks(2).run(train, 2, wanted)[0], plain, tally)
