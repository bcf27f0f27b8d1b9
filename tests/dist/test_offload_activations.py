"""Activations in host memory beside FSDP2: the same losses, and they did travel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_pool import Ranks
from tiny_runs import Settings, train

from shardwise.parallel.offload import Offloader

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
SETTINGS: Settings = {"data.seq_len": 256, "train.steps": 3, "shard.strategy": "full_shard"}


def train_counting(world: int, settings: Settings) -> tuple[list[float], int]:
    """On every rank: the losses, which rank 0 has, and how many tensors were sent."""
    original, count = Offloader.send, 0

    def send(self: Offloader, block: int) -> None:
        nonlocal count
        original(self, block)
        count += len(self._loads[block].parcels)

    Offloader.send = send  # type: ignore[method-assign]
    try:
        trained = train(world, settings)
    finally:
        Offloader.send = original  # type: ignore[method-assign]
    return ([] if trained is None else trained.losses), count


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param(
            {"memory.checkpoint_activations": "full", "train.accumulation": 2},
            marks=pytest.mark.long,
        ),
        {"memory.checkpoint_activations": "selective", "shard.reshard_after_forward": False},
    ],
    ids=["none", "full", "selective"],
)
def test_losses_stay(ranks: Pools, more: Settings) -> None:
    settings = {**SETTINGS, **more}
    (usual, none), _ = ranks(2).run(train_counting, 2, settings)
    (losses, count), (_, others) = ranks(2).run(
        train_counting, 2, {**settings, "memory.offload_activations": 1.0}
    )
    assert losses == usual and len(usual) == 3
    assert none == 0 and count == others > 0
