"""What one mesh saved, every other mesh reads to the last bit, and goes on with the next batch.

Each of ten layouts is read by two others here; each of 17 by all 17 where SHARDWISE_CHAOS is set.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks
from tiny_runs import SHAPE, Settings, start, wholes
from torch import Tensor

from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.restore import find_good, restore_checkpoint
from shardwise.checkpoint.save import Progress, Saver
from shardwise.checkpoint.state import kept_tensors, optimizer_tensors, saved_tensors
from shardwise.checkpoint.store import final_path
from shardwise.model.stage_part import is_staged
from shardwise.parallel.mesh import World
from shardwise.training.session import Session, build_loader
from shardwise.training.step import Stepper

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
Layout = tuple[str, int]
STEPS = 1
STRATEGIES: dict[str, Settings] = {
    "full": {"shard.strategy": "full_shard"},
    "hybrid": {"shard.strategy": "hybrid_shard", "mesh.replicate": 2},
    "copies": {"shard.strategy": "no_shard"},
    "offload": {"shard.strategy": "full_shard", "memory.offload": "cpu"},
    "context": {"shard.strategy": "full_shard", "mesh.context": 2},
    "copies of contexts": {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
    | {"mesh.context": 2},
}
SPLIT = ("context", "copies of contexts")
ALL_LAYOUTS: list[Layout] = [
    (name, world)
    for name in STRATEGIES
    for world in (1, 2, 3, 4)
    if (name != "hybrid" or world in (2, 4))
    and (name not in SPLIT or world == 4 or (name, world) == ("context", 2))
]
# Every way to shard, every number of ranks, and every number of them with the first.
SAMPLE: list[Layout] = [
    *(("full", world) for world in (1, 2, 3, 4)),
    *(("hybrid", 4), ("copies", 1), ("copies", 4), ("offload", 3)),
    *(("context", 2), ("copies of contexts", 4)),
]
IS_LONG = "SHARDWISE_CHAOS" in os.environ
LAYOUTS = ALL_LAYOUTS if IS_LONG else SAMPLE
# Keys and values have two rows: of three ranks one holds no part of them, and four hold columns.
TINY = {**SHAPE, "num_key_value_heads": 1, "head_dim": 2}
# Two stacked experts: rows on one and two ranks, columns on four.
EXPERTS: Settings = {
    "model.name": "tiny-mixtral",
    "model.overrides": {**SHAPE, "intermediate_size": 68, "num_local_experts": 2},
}
WITH_EXPERTS: dict[str, Settings] = {
    "experts": {**EXPERTS, "shard.strategy": "full_shard"},
    "dealt": {**EXPERTS, "mesh.replicate": 1, "mesh.expert": 2},
    "dealt copies": {**EXPERTS, "mesh.replicate": 2, "mesh.expert": 2},
}


# Stacks of gate and up are divided in two places each, and then sharded.
DIVIDED_MODEL: Settings = {
    "model.name": "tiny-mixtral",
    "model.overrides": {**SHAPE, "intermediate_size": 72, "num_local_experts": 3},
}
DIVIDED: dict[str, Settings] = {
    "plain": {"shard.strategy": "full_shard"},
    "tensor": {"mesh.tensor": 2, "shard.strategy": "full_shard"},
    "tensor-hybrid": {"mesh.tensor": 2, "mesh.replicate": 2, "mesh.shard": 1},
    "tensor-offload": {"mesh.tensor": 2, "memory.offload": "cpu", "optim.fused": False},
}
_LORA: Settings = {"adapter.method": "lora", "adapter.targets": ["*_proj"], "adapter.rank": 4}
ADAPTED: dict[str, Settings] = {
    "plain-adapters": {**_LORA, "shard.strategy": "full_shard"},
    "tensor-adapters": {**_LORA, "mesh.tensor": 2, "shard.strategy": "full_shard"},
}
DIVIDED_LAYOUTS: list[Layout] = [
    ("plain", 1),
    ("tensor", 2),
    ("tensor", 4),
    ("plain", 4),
    ("tensor-hybrid", 4),
    ("tensor-offload", 2),
]
# Three blocks in two and three stages, more of them than ranks, and beside other axes.
PIPED_SHAPE = {**SHAPE, "num_hidden_layers": 4}
PIPED: dict[str, Settings] = {
    "whole": {"shard.strategy": "full_shard"},
    "stages": {"mesh.pipeline": 2, "mesh.pipeline_blocks": "3+1"},
    "turns": {"mesh.pipeline": 2, "mesh.pipeline_schedule": "interleaved_1f1b"},
    "sharded stages": {"mesh.pipeline": 2, "shard.strategy": "full_shard"},
    "copied stages": {"mesh.pipeline": 2, "mesh.replicate": 2, "mesh.shard": 1},
    "divided stages": {"mesh.pipeline": 2, "mesh.tensor": 2},
    "divided turns": {"mesh.pipeline": 2, "mesh.tensor": 2, "mesh.shard": 2}
    | {"mesh.pipeline_schedule": "interleaved_1f1b"},
}
PIPED_LAYOUTS: list[Layout] = [
    ("stages", 2),
    ("whole", 1),
    ("sharded stages", 4),
    ("turns", 2),
    ("copied stages", 4),
    ("whole", 3),
    ("divided stages", 4),
    ("divided turns", 8),
]
TIED_LAYOUTS: list[Layout] = [
    ("tied stages", 2),
    ("tied whole", 3),
    ("tied sharded stages", 4),
    ("tied divided turns", 8),
]
# Experts that are dealt out inside a stage.
DEALT_STAGES: dict[str, Settings] = {
    "whole mixture": {"shard.strategy": "full_shard"},
    "dealt stages": {"mesh.pipeline": 2, "mesh.shard": 2, "mesh.expert": 2},
    "dealt turns": {"mesh.pipeline": 2, "mesh.shard": 4, "mesh.expert": 2}
    | {"mesh.pipeline_schedule": "interleaved_1f1b"},
}
DEALT_STAGE_LAYOUTS: list[Layout] = [
    ("dealt stages", 4),
    ("whole mixture", 3),
    ("dealt turns", 8),
]
# Meshes of every axis, which hold one and the same model.
AXES_MODEL: Settings = {
    "model.name": "tiny-mixtral",
    "model.overrides": {**SHAPE, "intermediate_size": 72, "num_local_experts": 4},
}
AXES: dict[str, Settings] = {
    "one axis": {"shard.strategy": "full_shard"},
    "blocks": {"mesh.tensor": 2, "shard.strategy": "full_shard"},
    "sequences and experts": {"mesh.context": 2, "mesh.expert": 2},
    "blocks and experts": {"mesh.tensor": 2, "mesh.shard": 2, "mesh.expert": 4},
    "all axes": {"mesh.tensor": 2, "mesh.context": 2, "mesh.expert": 2},
    "copies of all axes": {"mesh.replicate": 2, "mesh.tensor": 2, "mesh.context": 2}
    | {"mesh.expert": 4},
}
AXES_LAYOUTS: list[Layout] = [
    ("blocks", 2),
    ("sequences and experts", 2),
    ("one axis", 1),
    ("one axis", 4),
    ("blocks", 4),
    ("blocks and experts", 4),
    ("all axes", 4),
    ("all axes", 8),
    ("copies of all axes", 8),
]


@dataclass(frozen=True, slots=True)
class Held:
    """What a session holds, whole: a hash of every tensor, and of the next global batch."""

    tensors: dict[str, str]
    batch: list[str]
    position: int


def targets_of(source: Layout) -> list[Layout]:
    """All layouts, or two that lie as far apart as the source's place in the list."""
    if IS_LONG:
        return LAYOUTS
    place = LAYOUTS.index(source)
    return [LAYOUTS[(place + step) % len(LAYOUTS)] for step in (1, 6)]


def settings_of(layout: Layout) -> Settings:
    if layout[0] in ADAPTED:
        return {"model.overrides": SHAPE, "train.global_batch": 12, **ADAPTED[layout[0]]}
    if layout[0] in DIVIDED:
        return {**DIVIDED_MODEL, "train.global_batch": 12, **DIVIDED[layout[0]]}
    if (piped := layout[0].removeprefix("tied ")) in PIPED:
        shape = {**PIPED_SHAPE, "tie_word_embeddings": piped != layout[0]}
        passes = {"train.global_batch": 24, "train.accumulation": 2}
        return {"model.overrides": shape, **passes, **PIPED[piped]}
    if layout[0] in DEALT_STAGES:
        shape = {**PIPED_SHAPE, "intermediate_size": 72, "num_local_experts": 4}
        model = {"model.name": "tiny-mixtral", "model.overrides": shape}
        passes = {"train.global_batch": 24, "train.accumulation": 2}
        return {**model, **passes, **DEALT_STAGES[layout[0]]}
    if layout[0] in AXES:
        return {**AXES_MODEL, "train.global_batch": 12, **AXES[layout[0]]}
    strategy = {**STRATEGIES, **WITH_EXPERTS}[layout[0]]
    return {"model.overrides": TINY, "train.global_batch": 12, **strategy}


def train_and_save(layout: Layout, root: Path) -> Held:
    """On every rank: a step, then a checkpoint."""
    session = start(layout[1], settings_of(layout))
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    loader = build_loader(session)
    for step in range(STEPS):
        stepper.run(loader.step_batches(step), 1e-2)
    held = what_it_holds(session, STEPS)
    save(session, root, STEPS)
    return held


def save(session: Session, root: Path, step: int) -> None:
    saver = Saver(root, session.plan, session.model, session.optimizer, session.mesh.world)
    saver.start(Progress(step=step, position=step, tokens=0, loss=None, loss_scale=None))
    (outcome,) = saver.finish()
    saver.close()
    assert outcome.error is None


def restore_all(layout: Layout, roots: list[Path]) -> list[Held]:
    """On every rank: one session that is filled from each of `roots` in turn."""
    session = start(layout[1], settings_of(layout))
    results = []
    for root in roots:
        forget(session)
        found = find_good(root, session.mesh.world, verify=True, tell=refuse)
        assert found is not None
        parts = (session.plan, session.model, session.optimizer, session.mesh.world)
        restore_checkpoint(found, *parts)
        results.append(what_it_holds(session, found.manifest.position))
    return results


@torch.no_grad()
def forget(session: Session) -> None:
    """No number that a restore leaves out can pass for one that it read."""
    moments = (value for state in session.optimizer.state.values() for value in state.values())
    for tensor in (*session.model.parameters(), *moments):
        tensor.fill_(float("nan"))


def refuse(path: Path, reasons: list[str]) -> None:
    raise AssertionError(f"{path}: {reasons}")


def what_it_holds(session: Session, position: int) -> Held:
    tensors = saved_tensors(session.model) | optimizer_tensors(session.model, session.optimizer)
    kept = kept_tensors(session.model, tensors)
    loader = build_loader(session)
    mine = [digest(row) for batch in loader.step_batches(position) for row in batch.inputs]
    if not session.mesh.counts_batch:
        mine = []
    rows: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, mine)
    found = wholes(kept, in_stages=is_staged(session.model))
    digests = {name: digest(found[name]) for name in sorted(found)}
    return Held(digests, [row for rank in rows for row in rank], position)


def digest(tensor: Tensor) -> str:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


@pytest.fixture(scope="module")
def written(
    ranks: Pools, tmp_path_factory: pytest.TempPathFactory
) -> dict[Layout, tuple[Path, Held]]:
    """A checkpoint of every layout, and what was held when it was taken."""
    found = {}
    for layout in LAYOUTS:
        root = tmp_path_factory.mktemp(f"{layout[0]}-{layout[1]}-")
        held = ranks(layout[1]).run(train_and_save, layout, root)
        assert all(rank == held[0] for rank in held)
        found[layout] = root, held[0]
    return found


@pytest.mark.parametrize("target", LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[1]}")
def test_any_layout_reads_any_other(
    ranks: Pools, written: dict[Layout, tuple[Path, Held]], target: Layout
) -> None:
    sources = [source for source in LAYOUTS if target in targets_of(source)]
    roots = [written[source][0] for source in sources]
    for rank in ranks(target[1]).run(restore_all, target, roots):
        for source, held in zip(sources, rank, strict=True):
            assert held == written[source][1], source
            assert len(held.tensors) > 60
            assert len(held.batch) == 12


def test_every_layout_writes_whole_checkpoints(
    written: dict[Layout, tuple[Path, Held]],
) -> None:
    for (_, world), (root, held) in written.items():
        path = final_path(root, STEPS)
        assert [str(damage) for damage in check_checkpoint(path)] == []
        assert len(list(path.glob("rank-*.bin"))) == world
        assert held.position == STEPS
    batches = {tuple(held.batch) for _, held in written.values()}
    assert len(batches) == 1, "the next global batch is the same on every mesh"


@pytest.mark.long
def test_experts_cut_in_another_dim_are_read_anywhere(ranks: Pools, tmp_path: Path) -> None:
    held: dict[int, Held] = {}
    for world in (1, 4):
        root = tmp_path / str(world)
        held[world] = ranks(world).run(train_and_save, ("experts", world), root)[0]
        assert [str(damage) for damage in check_checkpoint(final_path(root, STEPS))] == []
    for source, target in [(4, 2), (4, 1), (1, 4)]:
        results = ranks(target).run(restore_all, ("experts", target), [tmp_path / str(source)])
        assert results == [[held[source]]] * target


@pytest.mark.long
def test_any_mesh_reads_what_a_tensor_axis_divides(ranks: Pools, tmp_path: Path) -> None:
    layouts = DIVIDED_LAYOUTS if IS_LONG else DIVIDED_LAYOUTS[:3]
    assert_read_anywhere(ranks, layouts, tmp_path)


def test_meshes_of_all_axes_read_each_other(ranks: Pools, tmp_path: Path) -> None:
    layouts = AXES_LAYOUTS if os.environ.get("SHARDWISE_CHAOS") else AXES_LAYOUTS[:2]
    assert_read_anywhere(ranks, layouts, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "layouts",
    [PIPED_LAYOUTS, TIED_LAYOUTS, DEALT_STAGE_LAYOUTS],
    ids=["untied", "tied", "dealt"],
)
def test_stages_and_whole_models_read_each_other(
    ranks: Pools, tmp_path: Path, layouts: list[Layout]
) -> None:
    assert_read_anywhere(ranks, layouts, tmp_path)


@pytest.mark.long
def test_any_mesh_reads_adapters_that_a_tensor_axis_divides(ranks: Pools, tmp_path: Path) -> None:
    layouts = [("plain-adapters", 2), ("tensor-adapters", 2), ("tensor-adapters", 4)]
    assert_read_anywhere(ranks, layouts, tmp_path)


def assert_read_anywhere(ranks: Pools, layouts: list[Layout], tmp_path: Path) -> None:
    """Every layout reads what every other has saved, to the last bit."""
    held: dict[Layout, Held] = {}
    roots = {layout: tmp_path / f"{layout[0]}-{layout[1]}" for layout in layouts}
    for layout in layouts:
        found = ranks(layout[1]).run(train_and_save, layout, roots[layout])
        held[layout] = found[0]
        assert all(rank == found[0] for rank in found)
        assert [str(damage) for damage in check_checkpoint(final_path(roots[layout], STEPS))] == []
    for target in layouts:
        sources = [layout for layout in layouts if layout != target]
        for rank in ranks(target[1]).run(restore_all, target, [roots[each] for each in sources]):
            for found_here, source in zip(rank, sources, strict=True):
                assert found_here == held[source]


DEALT = [("experts", 1), ("dealt", 2), ("dealt copies", 4)]
DEALT += [("experts", 4), ("dealt", 4)] if IS_LONG else []


@pytest.mark.long
def test_experts_that_are_dealt_out_are_read_anywhere(ranks: Pools, tmp_path: Path) -> None:
    """From one rank that has all experts to ranks that have parts, and back."""
    held: list[Held] = []
    roots = [tmp_path / f"{name}-{world}" for name, world in DEALT]
    for (name, world), root in zip(DEALT, roots, strict=True):
        everyone = ranks(world).run(train_and_save, (name, world), root)
        assert all(rank == everyone[0] for rank in everyone)
        held.append(everyone[0])
        assert [str(damage) for damage in check_checkpoint(final_path(root, STEPS))] == []
    assert len({tuple(each.tensors) for each in held}) == 1
    for name, world in DEALT:
        assert ranks(world).run(restore_all, (name, world), roots) == [held] * world


def damage_and_find(root: Path) -> tuple[int | None, list[str]]:
    """On every rank: one bit flips in each shard; returns the step found, and the reasons."""
    told: list[str] = []
    shard = final_path(root, STEPS) / f"rank-{dist.get_rank():05d}.bin"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    dist.barrier()
    found = find_good(
        root, World.joined(), verify=True, tell=lambda path, reasons: told.extend(reasons)
    )
    return (found.step if found else None), told


def test_all_ranks_learn_what_each_found(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(train_and_save, ("full", 2), tmp_path)
    changed = "its content has changed (sha256 differs)"
    reasons = [f"rank-00000.bin: {changed}", f"rank-00001.bin: {changed}"]
    assert ranks(2).run(damage_and_find, tmp_path) == [(None, reasons)] * 2
    file = tmp_path / f"quarantined-step-{STEPS:08d}" / "reason.txt"
    assert file.read_text().splitlines() == reasons


def save_little(root: Path) -> Any:
    """On every rank: a checkpoint of one small tensor that only one rank has to write."""
    session = start(dist.get_world_size(), settings_of(("copies", dist.get_world_size())))
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    saver = Saver(root, session.plan, model, optimizer, session.mesh.world)
    saver.start(Progress(step=1, position=1, tokens=0, loss=None, loss_scale=None))
    (outcome,) = saver.finish()
    saver.close()
    return outcome.error


def test_a_rank_with_nothing_to_write_leaves_no_stray(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2).run(save_little, tmp_path) == [None, None]
    assert [str(damage) for damage in check_checkpoint(final_path(tmp_path, 1))] == []
