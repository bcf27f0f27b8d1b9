"""Save: every rank writes its shards with DCP, rank 0 publishes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from shardwise.checkpoint.state import model_tensors, optimizer_tensors
from shardwise.checkpoint.store import Manifest, aside_path, clear_aside, file_sizes, prune, publish
from shardwise.plan.plan import Plan


def save_checkpoint(
    root: Path,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    tokens: int,
    loss: float | None,
) -> None:
    """Write step `step` and remove what retention no longer wants."""
    is_first = dist.get_rank() == 0
    if is_first:
        clear_aside(root, step)
    dist.barrier()
    aside = aside_path(root, step)
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    dcp.save(tensors, checkpoint_id=aside)
    if is_first:
        manifest = Manifest(
            step=step,
            tokens=tokens,
            global_batch=plan.global_batch.value,
            seed=plan.config.train.seed,
            world_size=dist.get_world_size(),
            loss=loss,
            files=file_sizes(aside),
        )
        publish(root, manifest)
        prune(root, plan.config.checkpoint.keep)
    dist.barrier()
