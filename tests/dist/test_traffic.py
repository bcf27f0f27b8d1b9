"""Accumulation must not multiply traffic: collectives of one optimizer step, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from rank_pool import Ranks
from tiny_runs import Settings, start
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.training.session import build_loader
from shardwise.training.step import Stepper

pytestmark = pytest.mark.dist

FULL: Settings = {"shard.strategy": "full_shard"}
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
# Embedding, two blocks, and norm with head.
NUM_UNITS = 4
REDUCE_SCATTER, ALL_REDUCE = "c10d::_reduce_scatter_base_", "c10d::allreduce_"


class CollectiveCounter(TorchDispatchMode):
    """Counts operations of c10d. A profiler counts the same, in ten times the CPU time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.namespace == "c10d":
            self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(world: int, settings: Settings) -> dict[str, int]:
    """How often each operation of c10d ran on this rank in the second step."""
    session = start(world, settings)
    assert len(session.units.units) == NUM_UNITS
    loader = build_loader(session)
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    stepper.run(loader.step_batches(0), 1e-3)
    with CollectiveCounter() as counter:
        stepper.run(loader.step_batches(1), 1e-3)
    return dict(counter.calls)


def count(
    ranks: Callable[[int], Ranks], world: int, strategy: Settings, passes: int, accumulate: str
) -> dict[str, int]:
    settings = {**strategy, "train.accumulation": passes, "memory.accumulate": accumulate}
    counts = ranks(world).run(count_collectives, world, settings)
    assert all(other == counts[0] for other in counts)
    return counts[0]


def test_gradients_are_scattered_on_the_last_pass_only(ranks: Callable[[int], Ranks]) -> None:
    once = count(ranks, 2, FULL, 1, "unsharded")
    assert once[REDUCE_SCATTER] == NUM_UNITS
    assert count(ranks, 2, FULL, 4, "unsharded")[REDUCE_SCATTER] == NUM_UNITS


def test_sharded_accumulation_scatters_every_pass(ranks: Callable[[int], Ranks]) -> None:
    assert count(ranks, 2, FULL, 4, "sharded")[REDUCE_SCATTER] == 4 * NUM_UNITS


def test_replicas_reduce_on_the_last_pass_only(ranks: Callable[[int], Ranks]) -> None:
    once = count(ranks, 4, HYBRID, 1, "unsharded")
    whole = count(ranks, 4, HYBRID, 4, "unsharded")
    pieces = count(ranks, 4, HYBRID, 4, "sharded")
    assert once[ALL_REDUCE] >= NUM_UNITS
    assert once[ALL_REDUCE] == whole[ALL_REDUCE] == pieces[ALL_REDUCE]
    assert whole[REDUCE_SCATTER] == NUM_UNITS
    assert pieces[REDUCE_SCATTER] == 4 * NUM_UNITS


def test_kept_parameters_are_gathered_once(ranks: Callable[[int], Ranks]) -> None:
    gather = "c10d::_allgather_base_"
    kept = count(ranks, 2, {"shard.strategy": "shard_grad_op"}, 1, "unsharded")
    freed = count(ranks, 2, FULL, 1, "unsharded")
    assert kept[gather] == NUM_UNITS
    # The last unit is never freed between forward and backward, and backward needs no embedding.
    assert freed[gather] == 2 * NUM_UNITS - 2


def test_parameters_in_host_memory_are_gathered_once_a_step(
    ranks: Callable[[int], Ranks],
) -> None:
    gather = "c10d::_allgather_base_"
    kept: Settings = {"shard.strategy": "shard_grad_op"}
    offload: Settings = {"memory.offload": "cpu"}
    assert count(ranks, 2, {**kept, **offload}, 4, "unsharded")[gather] == NUM_UNITS
    assert count(ranks, 2, kept, 4, "unsharded")[gather] == 4 * NUM_UNITS
    # Where parameters are freed after forward, there is no room to hold them.
    freed = count(ranks, 2, {**FULL, **offload}, 4, "unsharded")
    assert freed[gather] == 4 * (2 * NUM_UNITS - 2)
