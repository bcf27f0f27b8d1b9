"""torch.compile block by block: the same numbers, and one graph for all blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from rank_pool import Ranks
from tiny_runs import SHAPE, Settings, train
from torch._dynamo.utils import counters

from traced import without_kernels

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SETTINGS: Settings = {
    "model.overrides": {**SHAPE, "num_hidden_layers": 4},
    "shard.strategy": "full_shard",
    "train.steps": 3,
    "optim.warmup_steps": 0,
}


def train_compiled(world: int, settings: Settings, has_kernels: bool) -> dict[str, Any]:
    counters.clear()
    with nullcontext() if has_kernels else without_kernels():
        torch.compiler.reset()
        trained = train(world, {**settings, "memory.compile": True})
    return {
        "losses": None if trained is None else trained.losses,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }


FLOAT8: Settings = {
    "cluster.name": "1xH200",
    "precision.linear": "float8",
    "precision.float8_min_features": 16,
}


@pytest.mark.parametrize(
    ("remat", "more", "has_kernels"),
    [
        pytest.param("none", {}, True, marks=pytest.mark.long),
        pytest.param("full", {}, True, marks=pytest.mark.long),
        pytest.param("selective", {}, True, marks=pytest.mark.long),
        ("selective", {}, False),
        pytest.param("selective", FLOAT8, True, marks=[pytest.mark.torchao, pytest.mark.long]),
    ],
)
def test_compiled_blocks_give_the_same_losses(
    ranks: Callable[[int], Ranks], remat: str, more: Settings, has_kernels: bool
) -> None:
    settings = {**SETTINGS, **more, "memory.checkpoint_activations": remat}
    eager = ranks(1).run(train, 1, settings)[0]
    compiled = ranks(1).run(train_compiled, 1, settings, has_kernels)[0]
    assert compiled["losses"] == pytest.approx(eager.losses, rel=1e-4)
    # For the blocks, the last norm, a slice of the loss, and what scales the gradients of the head
    # and of its input.
    assert compiled["graphs"] == 5, compiled
