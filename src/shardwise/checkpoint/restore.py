"""Restore the newest good checkpoint, which all ranks verify together, onto any mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardwise.checkpoint.audit import check_contents, check_files
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.portions import PortionPlanner
from shardwise.checkpoint.site_tensors import SiteState, is_of_sites
from shardwise.checkpoint.state import (
    kept_tensors,
    optimizer_tensors,
    saved_tensors,
    set_optimizer_tensors,
)
from shardwise.checkpoint.storage import ShardReader
from shardwise.checkpoint.store import (
    Checkpoint,
    clear_partials,
    list_entries,
    quarantine,
    validate_readable,
)
from shardwise.checkpoint.structure import check_tensors, refuse_tensors
from shardwise.errors import UserError
from shardwise.model.stage_part import is_staged
from shardwise.parallel.mesh import World
from shardwise.parallel.torchao_float8 import refresh_scales
from shardwise.plan.planned import Plan

Tell = Callable[[Path, list[str]], None]


def find_good(root: Path, world: World, *, verify: bool, tell: Tell) -> Checkpoint | None:
    """The newest good checkpoint. Damaged ones are quarantined and reported on the way.

    One that cannot be read is an error on all ranks, because it may be the newest, and good. All
    ranks call this together. Only rank 0 looks at the directory, so all see the same.
    """
    while True:
        candidate = _newest_candidate(root, world, tell)
        if candidate is None:
            return None
        damages = _check_together(candidate, world) if verify else []
        if not damages:
            return candidate
        world.decide(partial(quarantine, candidate.path, damages))
        tell(candidate.path, damages)
        dist.barrier(group=world.group)


def restore_checkpoint(
    checkpoint: Checkpoint,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    sites: SiteState | None = None,
) -> None:
    """Load model and optimizer from `checkpoint`. Each rank loads its own shards.

    The checkpoint must hold their tensors and no others. Its hashes do not show that: they only
    show that its files belong together.
    """
    optimizer_state = optimizer_tensors(model, optimizer)
    live = {**saved_tensors(model), **optimizer_state}
    index = read_index(checkpoint.path)
    tensors = live if sites is None else sites.names_in(index, live)
    kept = kept_tensors(model, tensors)
    # Nobody here reads what other sites had, nor what belongs to other stages.
    theirs = _names_of_all(live, world) if is_staged(model) else live.keys()
    others = {name for name in index if is_of_sites(name) or name in theirs} - tensors.keys()
    if wrong := check_tensors({n: each for n, each in index.items() if n not in others}, kept):
        raise refuse_tensors(checkpoint.path, wrong)
    dcp.load(
        tensors,
        storage_reader=ShardReader(checkpoint.path, index),
        planner=PortionPlanner(kept),
        process_group=world.group,
    )
    set_optimizer_tensors(model, optimizer, optimizer_state)
    if sites is not None:
        sites.take_common(index, live)
    refresh_scales(model, plan)


def _names_of_all(live: Mapping[str, Tensor], world: World) -> set[str]:
    """The names of the tensors of all stages."""
    return {name for names in world.gather(sorted(live)) for name in names}


def _newest_candidate(root: Path, world: World, tell: Tell) -> Checkpoint | None:
    def look() -> Checkpoint | None:
        # In this order: a job that has lost the directory may be about to publish its save. It
        # finds it gone, or has published it before the directory is read.
        clear_partials(root)
        for entry in reversed(list_entries(root)):
            if entry.checkpoint is not None:
                return entry.checkpoint
            if entry.is_published:
                validate_readable(entry)
                quarantine(entry.path, [entry.reason])
                tell(entry.path, [entry.reason])
        return None

    return world.decide(look)


def _check_together(checkpoint: Checkpoint, world: World) -> list[str]:
    """Each rank hashes its share of the files, and all learn what any of them found."""
    names = sorted(checkpoint.manifest.files)[world.rank :: world.size]
    mine: list[str] | UserError
    try:
        found = check_files(checkpoint, names)
        if world.is_first and not found:
            found = check_contents(checkpoint.path)
        mine = [str(damage) for damage in found]
    except UserError as error:
        mine = error
    everyone = world.gather(mine)
    for said in everyone:
        if isinstance(said, UserError):
            raise said
    return sorted(damage for rank in everyone for damage in rank)  # type: ignore[union-attr]
