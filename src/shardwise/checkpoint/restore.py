"""Restore: the newest checkpoint that is good, verified by all ranks, laid over any mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner

from shardwise.checkpoint.check import check_files, check_index
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.state import model_tensors, optimizer_tensors, set_optimizer_tensors
from shardwise.checkpoint.storage import ShardReader
from shardwise.checkpoint.store import Checkpoint, clear_partials, list_entries, quarantine
from shardwise.parallel.float8 import refresh_scales
from shardwise.plan.plan import Plan

Tell = Callable[[Path, list[str]], None]


def find_good(root: Path, *, verify: bool, tell: Tell) -> Checkpoint | None:
    """The newest good checkpoint; damaged ones are quarantined and told on the way.

    Called by all ranks together. Rank 0 alone looks at the directory, so that all see the same.
    """
    while True:
        candidate = _newest_candidate(root, tell)
        if candidate is None:
            return None
        damages = _check_together(candidate) if verify else []
        if not damages:
            return candidate
        if dist.get_rank() == 0:
            quarantine(candidate.path, damages)
        tell(candidate.path, damages)
        dist.barrier()


def restore_checkpoint(
    checkpoint: Checkpoint, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Fill model and optimizer from `checkpoint`, each rank its own part."""
    model_state = model_tensors(model)
    optimizer_state = optimizer_tensors(model, optimizer)
    dcp.load(
        {**model_state, **optimizer_state},
        storage_reader=ShardReader(checkpoint.path, read_index(checkpoint.path)),
        planner=DefaultLoadPlanner(flatten_state_dict=False),
    )
    set_optimizer_tensors(model, optimizer, optimizer_state)
    refresh_scales(model, plan)


def _newest_candidate(root: Path, tell: Tell) -> Checkpoint | None:
    found: list[Checkpoint | None] = [None]
    if dist.get_rank() == 0 and root.is_dir():
        clear_partials(root)
        for entry in reversed(list_entries(root)):
            if entry.state == "damaged":
                quarantine(entry.path, [entry.reason])
                tell(entry.path, [entry.reason])
            elif entry.checkpoint is not None:
                found = [entry.checkpoint]
                break
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _check_together(checkpoint: Checkpoint) -> list[str]:
    """Each rank hashes its share of the files; all learn what any of them found."""
    names = sorted(checkpoint.manifest.files)[dist.get_rank() :: dist.get_world_size()]
    mine = check_files(checkpoint, names)
    if dist.get_rank() == 0 and not mine:
        mine = check_index(checkpoint.path)
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, [str(damage) for damage in mine])
    return sorted(damage for rank in everyone for damage in rank)
