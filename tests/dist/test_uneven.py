"""Ranks and micro-batches with different numbers of labels that count, down to none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks
from tiny_runs import (
    Settings,
    Tally,
    Trained,
    assert_close,
    run_steps,
    start,
    train_plainly,
)
from torch import Tensor

from shardwise.data.loader import MicroBatch
from shardwise.data.sequences import IGNORE_INDEX
from shardwise.training.session import build_loader

pytestmark = pytest.mark.dist

# Labels that count in each row of the global batch: of four ranks the second has none at all, of
# two the first has none in its first micro-batch.
NUM_VALID = (0, 0, 0, 3, 0, 0, 0, 0, 1, 9, 16, 16, 5, 0, 2, 16)
SETTINGS: Settings = {"model.name": "tiny-qwen", "train.global_batch": len(NUM_VALID)}


def mask_labels(labels: Tensor, first_row: int = 0) -> Tensor:
    counts = torch.tensor(NUM_VALID[first_row : first_row + len(labels)])
    return labels.where(torch.arange(labels.shape[1]) < counts[:, None], IGNORE_INDEX)


def train_unevenly(world: int, settings: Settings) -> Any:
    session = start(world, settings)
    rank = dist.get_rank()
    loader = build_loader(session)

    def batches_of(step: int) -> list[MicroBatch]:
        masked = []
        for index, batch in enumerate(loader.step_batches(step)):
            row = (rank * loader.accumulation + index) * loader.micro_batch
            labels = mask_labels(batch.labels, row)
            count = int((labels != IGNORE_INDEX).sum())
            masked.append(MicroBatch(batch.inputs, labels, count))
        return masked

    return run_steps(session, range(session.plan.config.train.steps), batches_of)


@pytest.fixture(scope="module")
def plain(ranks: Callable[[int], Ranks]) -> Trained:
    return ranks(1).run(train_plainly, SETTINGS, mask_labels)[0]


@pytest.mark.parametrize("loss", ["chunked", pytest.param("full", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("world", "strategy", "accumulation"),
    [
        (1, "full_shard", 4),
        (2, "full_shard", 4),
        (2, "no_shard", 4),
        (4, "full_shard", 1),
        (4, "hybrid_shard", 4),
    ],
)
def test_uneven_ranks_equal_one_process(
    ranks: Callable[[int], Ranks],
    plain: Trained,
    tally: Tally,
    world: int,
    strategy: str,
    accumulation: int,
    loss: str,
) -> None:
    settings = {
        **SETTINGS,
        "shard.strategy": strategy,
        "train.accumulation": accumulation,
        "memory.loss": loss,
    }
    if strategy == "hybrid_shard":
        settings["mesh.replicate"] = 2
    assert_close(ranks(world).run(train_unevenly, world, settings)[0], plain, tally)
