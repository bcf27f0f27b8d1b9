"""The host's AdamW beside the next forward: the numbers of one after the other, to the last bit.

Here the thread updates a unit only when the next forward has come to it, or somebody waits for all
of them. So a forward that does not wait reads old parameters, and a step that waits for its updates
does not end before the gate gives up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, current_thread
from typing import Any

import pytest
from rank_pool import Ranks
from tiny_runs import Settings, Trained, assert_same, train

from shardwise.training.overlapped import OverlappedAdamW, Part

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
OFFLOAD: Settings = {"memory.offload": "cpu", "optim.clip_norm": 0.1}
FULL: Settings = {**OFFLOAD, "shard.strategy": "full_shard"}
PLAIN: Settings = {"memory.overlap_optimizer": False}
_GIVES_UP_S = 120


class Gate:
    """How many units the main thread waits for, and how many the other thread has begun."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.wanted = self.begun = 0

    def close(self) -> None:
        with self.changed:
            self.wanted = self.begun = 0

    def open(self, count: int) -> None:
        with self.changed:
            self.wanted = max(self.wanted, count)
            self.changed.notify_all()

    def enter(self) -> None:
        with self.changed:
            self.begun += 1
            number = self.begun
            if not self.changed.wait_for(lambda: self.wanted >= number, _GIVES_UP_S):
                raise TimeoutError(f"nobody came to unit {number}")


@contextmanager
def as_late_as_possible() -> Iterator[None]:
    gate, cls = Gate(), OverlappedAdamW
    run, wait_for, step = cls._run, cls._wait_for, cls.step

    def gated_run(self: Any, part: Part) -> None:
        if current_thread().name.startswith("adamw"):
            gate.enter()
        run(self, part)

    def opening_wait(self: Any, count: int) -> None:
        gate.open(count)
        wait_for(self, count)

    def closing_step(self: Any, closure: None = None) -> None:
        self.settle()
        gate.close()
        step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "_run", gated_run)
        patch.setattr(cls, "_wait_for", opening_wait)
        patch.setattr(cls, "step", closing_step)
        yield


def train_late(world: int, settings: Settings) -> Trained | None:
    with as_late_as_possible():
        return train(world, settings)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {**FULL, "train.accumulation": 2, "model.name": "tiny-qwen"}),
        (2, {**OFFLOAD, "shard.strategy": "shard_grad_op", "train.accumulation": 2}),
        pytest.param(
            *(2, {**FULL, "shard.forward_prefetch": 1, "memory.checkpoint_activations": "full"}),
            marks=pytest.mark.long,
        ),
    ],
    ids=["tied", "held", "prefetched"],
)
def test_updates_that_come_late_change_no_bit(ranks: Pools, world: int, settings: Settings) -> None:
    usual = ranks(world).run(train, world, {**settings, **PLAIN})[0]
    assert_same(ranks(world).run(train_late, world, settings)[0], usual)


@pytest.mark.parametrize(("world", "strategy"), [(1, "no_shard"), (2, "shard_grad_op")])
def test_parameters_that_stay_gathered_between_passes_change_no_bit(
    ranks: Pools, world: int, strategy: str
) -> None:
    settings: Settings = {
        "optim.clip_norm": 0.1,
        "train.accumulation": 2,
        "shard.strategy": strategy,
    }
    on_device = ranks(world).run(train, world, settings)[0]
    assert_same(ranks(world).run(train, world, {**settings, **OFFLOAD})[0], on_device)
