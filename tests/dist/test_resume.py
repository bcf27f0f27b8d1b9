"""A run that stops and goes on, on the same mesh or another, is the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from legs import join, run_leg
from rank_pool import Ranks
from tiny_runs import (
    STEPS,
    TOLERANCE,
    Settings,
    assert_same,
    differences,
    train,
)

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
FULL: Settings = {"shard.strategy": "full_shard"}
GRAD_OP: Settings = {"shard.strategy": "shard_grad_op"}
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
COPIES: Settings = {"shard.strategy": "no_shard"}


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen"])
def test_resume_on_any_mesh(ranks: Pools, tmp_path: Path, model: str) -> None:
    name: Settings = {"model.name": model}
    unbroken = ranks(2).run(train, 2, {**name, **FULL})[0]
    begun = ranks(2).run(run_leg, 2, {**name, **FULL}, tmp_path, STEPS - 1)[0]
    resumed = ranks(2).run(run_leg, 2, {**name, **FULL}, tmp_path, STEPS)[0]
    assert_same(join(begun, resumed), unbroken)
    for world, strategy in [(1, FULL), (2, COPIES), (4, FULL), (4, HYBRID)]:
        other = ranks(world).run(run_leg, world, {**name, **strategy}, tmp_path, STEPS)[0]
        assert max(differences(join(begun, other), unbroken)) <= TOLERANCE


@pytest.mark.parametrize(
    ("world", "strategy"),
    [(4, HYBRID), pytest.param(2, COPIES, marks=pytest.mark.long), (1, FULL)],
)
def test_the_same_mesh_resumes_bit_for_bit(
    ranks: Pools, tmp_path: Path, world: int, strategy: Settings
) -> None:
    settings = {**strategy, "train.accumulation": 2}
    unbroken = ranks(world).run(train, world, settings)[0]
    begun = ranks(world).run(run_leg, world, settings, tmp_path, STEPS - 1)[0]
    resumed = ranks(world).run(run_leg, world, settings, tmp_path, STEPS)[0]
    assert_same(join(begun, resumed), unbroken)


def test_resume_from_mesh_to_mesh(ranks: Pools, tmp_path: Path) -> None:
    name: Settings = {"model.name": "tiny-qwen", "train.steps": 4}
    unbroken = ranks(2).run(train, 2, {**name, **FULL})[0]
    legs = [(2, FULL, 1), (4, HYBRID, 2), (2, COPIES, 3), (4, GRAD_OP, 4)]
    results = [
        ranks(world).run(run_leg, world, {**name, **strategy}, tmp_path, stop)[0]
        for world, strategy, stop in legs
    ]
    whole = results[0]
    for result in results[1:]:
        whole = join(whole, result)
    assert max(differences(whole, unbroken)) <= TOLERANCE


@pytest.mark.parametrize("offload", ["none", pytest.param("cpu", marks=pytest.mark.long)])
def test_offloaded_state_resumes(ranks: Pools, tmp_path: Path, offload: str) -> None:
    settings = {**FULL, "memory.offload": offload}
    unbroken = ranks(2).run(train, 2, settings)[0]
    begun = ranks(2).run(run_leg, 2, {**FULL, "memory.offload": "cpu"}, tmp_path, STEPS - 1)[0]
    resumed = ranks(2).run(run_leg, 2, settings, tmp_path, STEPS)[0]
    assert_same(join(begun, resumed), unbroken)


@pytest.mark.long
def test_a_state_of_bf16_resumes_bit_for_bit(ranks: Pools, tmp_path: Path) -> None:
    settings = {**FULL, "optim.state": "bf16"}
    unbroken, wide = (ranks(2).run(train, 2, each)[0] for each in (settings, FULL))
    begun = ranks(2).run(run_leg, 2, settings, tmp_path, STEPS - 1)[0]
    resumed = ranks(2).run(run_leg, 2, settings, tmp_path, STEPS)[0]
    assert_same(join(begun, resumed), unbroken)
    # Rounding moves a parameter by less than a hundredth of what it was moved anyway.
    assert 0 < max(differences(unbroken, wide)) < 1e-3
    # Other ranks round other numbers up; the state of a checkpoint may also become wider.
    for world, other in [(4, settings), (2, FULL)]:
        found = ranks(world).run(run_leg, world, other, tmp_path, STEPS)[0]
        assert max(differences(join(begun, found), unbroken)) < 1e-3
