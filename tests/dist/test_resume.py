"""A run that stops and goes on, on the same mesh or another, is the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_pool import Ranks
from tiny_runs import (
    STEPS,
    TOLERANCE,
    Settings,
    Trained,
    assert_same,
    differences,
    run_steps,
    start,
    train,
)

from shardwise.checkpoint.restore import find_good, restore_checkpoint
from shardwise.checkpoint.save import Progress, Saver

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
FULL: Settings = {"shard.strategy": "full_shard"}
GRAD_OP: Settings = {"shard.strategy": "shard_grad_op"}
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
COPIES: Settings = {"shard.strategy": "no_shard"}


def run_leg(world: int, settings: Settings, root: Path, stop: int) -> Any:
    """Go on from the newest checkpoint under `root` to step `stop`, and save there."""
    session = start(world, settings)
    plan, model, optimizer = session.plan, session.model, session.optimizer
    found = find_good(root, session.mesh.world, verify=True, tell=lambda path, reasons: None)
    if found is not None:
        restore_checkpoint(found, plan, model, optimizer, session.mesh.world)
    result = run_steps(session, range(found.manifest.step if found else 0, stop))
    if stop < plan.config.train.steps:
        saver = Saver(root, plan, model, optimizer, session.mesh.world)
        saver.start(Progress(step=stop, position=stop, tokens=0, loss=None, loss_scale=None))
        (outcome,) = saver.finish()
        saver.close()
        if outcome.error is not None:
            raise RuntimeError(outcome.error)
    return result


def join(first: Trained, second: Trained) -> Trained:
    return Trained(first.losses + second.losses, first.norms + second.norms, second.params)


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
