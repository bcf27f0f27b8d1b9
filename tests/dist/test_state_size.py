"""What sharding is for: parameters and Adam state fall as 1/N."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rank_pool import Ranks
from tiny_runs import SHAPE, Settings, run_steps, start
from torch import Tensor
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.dist

# Every first dimension divides by four.
SETTINGS: Settings = {
    "model.name": "tiny-llama",
    "model.overrides": {**SHAPE, "intermediate_size": 64, "vocab_size": 320},
    "shard.strategy": "full_shard",
}
# Fewer experts than ranks: these are cut in another dim.
EXPERTS: Settings = {
    "model.name": "tiny-mixtral",
    "model.overrides": {**SETTINGS["model.overrides"], "num_local_experts": 2},
    "shard.strategy": "full_shard",
}


def state_bytes(world: int, settings: Settings) -> int:
    """Bytes of parameters and optimizer state that this rank holds after a step."""
    session = start(world, settings)
    run_steps(session, range(1))
    moments = (value for state in session.optimizer.state.values() for value in state.values())
    tensors = [*session.model.parameters(), *moments]
    return sum(held_bytes(tensor) for tensor in tensors)


def held_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().nbytes() if isinstance(local, torch.Tensor) else 0


@pytest.mark.parametrize("settings", [SETTINGS, EXPERTS], ids=["dense", "experts"])
def test_state_falls_as_one_over_n(ranks: Callable[[int], Ranks], settings: Settings) -> None:
    (whole,) = ranks(1).run(state_bytes, 1, settings)
    for world in (2, 4):
        for size in ranks(world).run(state_bytes, world, settings):
            assert size == pytest.approx(whole / world, rel=0.02)


def expert_shares(world: int) -> list[float]:
    """What part of each stacked tensor of experts this rank holds."""
    params = start(world, EXPERTS).model.named_parameters()
    return [held_bytes(p) / (4 * p.numel()) for name, p in params if ".experts." in name]


def test_every_rank_holds_its_part_of_few_experts(ranks: Callable[[int], Ranks]) -> None:
    for shares in ranks(4).run(expert_shares, 4):
        assert shares == [0.25] * 4  # two tensors in each of two layers


def test_replicas_hold_whole_copies(ranks: Callable[[int], Ranks]) -> None:
    (whole,) = ranks(1).run(state_bytes, 1, SETTINGS)
    settings = {**SETTINGS, "shard.strategy": "no_shard"}
    assert ranks(2).run(state_bytes, 2, settings) == [pytest.approx(whole, rel=0.02)] * 2
    settings = {**SETTINGS, "shard.strategy": "hybrid_shard", "mesh.replicate": 2}
    assert ranks(4).run(state_bytes, 4, settings) == [pytest.approx(whole / 2, rel=0.02)] * 4
