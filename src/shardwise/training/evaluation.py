"""The loss on what is held out, and how well answers are told apart there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data.loader import MicroBatch
from shardwise.metrics.progress_line import PreferenceScores
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.shard import reshard_all
from shardwise.training.objective import Objective
from shardwise.training.preference_losses import scores_of


@torch.no_grad()
def evaluate(
    model: Any,
    batches: Sequence[MicroBatch],
    objective: Objective,
    device: torch.device,
    mesh: Mesh,
) -> tuple[float, PreferenceScores | None]:
    """Mean loss over the held-out batches of all ranks."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    scores = []
    model.eval()
    objective.prepare(model, batches, device)
    for batch in batches:
        found = objective.loss(model, batch, device)
        totals[0] += found.total
        totals[1] += objective.num_terms(batch) * mesh.counts_eval
        scores += [] if found.scores is None else [found.scores]
    model.train()
    reshard_all(model)
    dist.all_reduce(totals, group=mesh.eval_group)
    return (totals[0] / totals[1]).item(), scores_of(scores, mesh.eval_group)
