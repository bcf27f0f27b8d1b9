"""Collectives that return a tensor: there, and in the order that we take them to be in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from transformers.models.gpt_oss import modeling_gpt_oss

from shardwise.internals.hugging_face import spelled_out_attention
from shardwise.internals.tensor_collectives import GATHER, exchanged, gathered, replaced
from shardwise.tunnel.world import rank_zero_of


@pytest.fixture
def group() -> Iterator[str]:
    """The name of a group of four ranks, of which only the first exists."""
    with rank_zero_of(4):
        world = dist.group.WORLD
        assert world is not None
        yield str(world.group_name)


def test_tensors_of_ranks_follow_each_other(group: str) -> None:
    mine = torch.arange(6.0).view(2, 3)
    found = gathered(mine.T.contiguous().T, 4, group)
    assert found.shape == (8, 3)
    assert torch.equal(found[:2], mine)


def test_rows_are_taken_as_they_are_counted(group: str) -> None:
    found = exchanged(torch.ones(3, 2), [0, 1, 4, 0], [1, 0, 2, 0], group)
    assert found.shape == (5, 2)


def test_the_compiler_sees_them(group: str) -> None:
    def both(mine: torch.Tensor) -> torch.Tensor:
        return exchanged(gathered(mine, 4, group), [2] * 4, [2] * 4, group)

    graph = torch.compile(both, backend="eager", fullgraph=True)
    assert graph(torch.ones(2, 2)).shape == (8, 2)


def test_functions_stand_in_for_them_while_a_block_runs(group: str) -> None:
    def gather(mine: torch.Tensor, num_ranks: int, name: str) -> torch.Tensor:
        return torch.full((num_ranks * len(mine),), 7.0)

    graph = torch.compile(gathered, backend="aot_eager", fullgraph=True)
    with replaced({GATHER: gather}):
        assert gathered(torch.ones(2), 4, group).eq(7).all()
        assert graph(torch.ones(2), 4, group).eq(7).all()
    assert gathered(torch.ones(2), 4, group)[:2].eq(1).all()


def test_a_family_spells_out_its_attention() -> None:
    layer = object.__new__(modeling_gpt_oss.GptOssAttention)
    assert spelled_out_attention(layer) is modeling_gpt_oss.eager_attention_forward
    assert spelled_out_attention(torch.nn.Linear(1, 1)) is None
