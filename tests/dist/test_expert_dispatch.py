"""Experts on the ranks of a group give what one rank gives that has them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks
from torch import Tensor

from shardwise.parallel.dispatch import AllToAll, Dispatch
from shardwise.parallel.expert_pass import Experts
from shardwise.parallel.received_rows import ReceivedRows

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
EXPERTS, HIDDEN, WIDTH, CHOSEN, TOKENS = 8, 32, 48, 2, 12
CLAMP = (1.702, 2.0)


@pytest.mark.parametrize("is_clamped", [False, True], ids=["plain", "clamped"])
@pytest.mark.parametrize("routing", ["even", "one rank is idle", "one expert has all"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_group_computes_what_one_rank_does(
    ranks: Pools, world: int, routing: str, is_clamped: bool
) -> None:
    found = ranks(world).run(by_group, routing, is_clamped)
    for rank in found:
        for name, (one, other) in rank.items():
            assert one.shape == other.shape, name
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)


def by_group(routing: str, is_clamped: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """What this rank finds, and its part of what one rank finds for all tokens."""
    rank, world = dist.get_rank(), dist.get_world_size()
    given, chosen = made_up(world, routing, is_clamped)
    group: Any = dist.group.WORLD
    mine = {name: part_of(name, each, rank, world) for name, each in given.items()}
    x, weights, *own = (each.clone().requires_grad_() for each in mine.values())
    trip = Dispatch.of(part_of("x", chosen, rank, world), EXPERTS, AllToAll(group))
    rows = *trip.send(x, weights).take(), trip.experts, trip.ends
    clamp = CLAMP if is_clamped else ()
    found = trip.bring_back(ReceivedRows.apply(*rows, *own[:2], False, *own[2:], *clamp))
    (found * slope(found)).sum().backward()
    everyone = [each.clone().requires_grad_() for each in given.values()]
    tokens, shares, *stacks = everyone
    expected = Experts.apply(tokens, chosen, shares, *stacks[:2], False, *stacks[2:], *clamp)
    whole = torch.cat([slope(found)] * world)
    (expected * whole).sum().backward()
    grads = {
        f"gradient of {name}": (one.grad, part_of(name, other.grad, rank, world))
        for name, one, other in zip(given, (x, weights, *own), everyone, strict=True)
    }
    result = (found.detach(), part_of("x", expected.detach(), rank, world))
    assert sum(trip.sent) == TOKENS * CHOSEN
    return {"result": result, **grads}  # type: ignore[dict-item]


def made_up(world: int, routing: str, is_clamped: bool) -> tuple[dict[str, Tensor], Tensor]:
    numbers = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers)

    given = {"x": some(world * TOKENS, HIDDEN), "weights": some(world * TOKENS, CHOSEN).abs()}
    given["gate_up"] = 0.3 * some(EXPERTS, 2 * WIDTH, HIDDEN)
    given["down"] = 0.3 * some(EXPERTS, HIDDEN, WIDTH)
    if is_clamped:
        given["bias"] = some(EXPERTS, 2 * WIDTH)
        given["down_bias"] = some(EXPERTS, HIDDEN)
    used = {"even": EXPERTS, "one rank is idle": EXPERTS // 2, "one expert has all": 1}[routing]
    shape = (world * TOKENS, CHOSEN)
    return given, torch.randint(used, shape, generator=numbers)


def part_of(name: str, whole: Any, rank: int, world: int) -> Tensor:
    """A rank's tokens, or its experts."""
    part: Tensor = whole.chunk(world)[rank]
    return part


def slope(found: Tensor) -> Tensor:
    return torch.linspace(-1, 1, found.numel()).view_as(found)
