"""Restore: each rank reads its own part, whatever mesh wrote the checkpoint."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardwise.checkpoint.state import model_tensors, optimizer_tensors, set_optimizer_tensors
from shardwise.checkpoint.store import Checkpoint
from shardwise.errors import UserError
from shardwise.plan.plan import Plan


def restore_checkpoint(
    checkpoint: Checkpoint, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Fill model and optimizer from `checkpoint`."""
    _validate_same_batches(checkpoint, plan)
    model_state = model_tensors(model)
    optimizer_state = optimizer_tensors(model, optimizer)
    dcp.load(model_state | optimizer_state, checkpoint_id=checkpoint.path)
    set_optimizer_tensors(model, optimizer, optimizer_state)


def _validate_same_batches(checkpoint: Checkpoint, plan: Plan) -> None:
    """The data position is steps x global batch, in an order that the seed decides."""
    saved = checkpoint.manifest
    now = (plan.global_batch.value, plan.config.train.seed)
    if (saved.global_batch, saved.seed) != now:
        raise UserError(
            f"{checkpoint.path} was written with global_batch={saved.global_batch} and "
            f"seed={saved.seed}; this run has global_batch={now[0]} and seed={now[1]}",
            why="the data would not go on where it stopped",
            fix=f"set train.global_batch={saved.global_batch} train.seed={saved.seed}, or give "
            "the run another name",
        )
