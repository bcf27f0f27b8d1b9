"""Collectives as they are told to a listener: their bytes, their groups, and their own results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.internals.collective_calls import Kind, check_calls, told_to
from shardwise.internals.tensor_collectives import exchanged, gathered

Told = list[tuple[str, int, str]]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    """A group of one rank, whose collectives are real."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def test_every_collective_is_told_with_its_whole_tensor(group: ProcessGroup) -> None:
    told: Told = []

    def listen(kind: Kind, num_bytes: int, of: ProcessGroup) -> AbstractContextManager[object]:
        told.append((kind, num_bytes, str(of.group_name)))
        return nullcontext()

    mine, name = torch.arange(8.0), str(group.group_name)
    with told_to(listen):
        whole = torch.zeros(8)
        dist.all_gather_into_tensor(whole, mine, group)
        assert torch.equal(whole, mine)
        dist.reduce_scatter_tensor(torch.zeros(8), mine, group=group)
        work = dist.all_reduce(mine, group=group, async_op=True)
        assert work is not None and work.wait()
        assert torch.equal(gathered(mine, 1, name), mine)
        assert torch.equal(exchanged(mine[:4], [4], [4], name), mine[:4])
        torch.compile(gathered, backend="eager")(mine[:2], 1, name)
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_gather", "all_to_all", "all_gather")
    assert told == [*zip(kinds, (32, 32, 32, 32, 16, 8), [name] * 6, strict=True)]
    dist.all_reduce(mine, group=group)
    assert len(told) == 6


def test_the_operators_take_what_is_read_of_them() -> None:
    check_calls()
