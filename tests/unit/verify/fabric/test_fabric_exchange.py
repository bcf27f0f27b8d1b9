"""Wrong data is found in every collective: what each rank sends is put together here by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch.distributed import ProcessGroup

from shardwise.facts.collective_cost import Collective
from shardwise.verify.fabric.exchange import Exchange
from shardwise.verify.fabric.found import KINDS

RANKS = 3


@dataclass(frozen=True)
class AbsentGroup:
    """A process group without processes, as one of its ranks sees it."""

    own_rank: int

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return RANKS


def filled(kind: Collective) -> list[Exchange]:
    """One on each rank of a group that is not there."""
    groups = [cast(ProcessGroup, AbsentGroup(rank)) for rank in range(RANKS)]
    found = [Exchange(kind, 1203, torch.device("cpu"), group) for group in groups]
    for each in found:
        each.fill()
    return found


def deliver(kind: Collective, ranks: list[Exchange]) -> None:
    """What the collective is defined to do, in plain tensors."""
    sent = torch.stack([each._sent for each in ranks])
    total = sent.sum(0)
    for rank, each in enumerate(ranks):
        place = slice(rank * each.count, (rank + 1) * each.count)
        if kind == "all_gather":
            each._arrived.copy_(sent.flatten())
        elif kind == "reduce_scatter":
            each._arrived.copy_(total[place])
        elif kind == "all_reduce":
            each._arrived.copy_(total)
        else:
            each._arrived.copy_(sent[:, place].flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_right_data_is_right_and_one_changed_element_is_not(kind: Collective) -> None:
    ranks = filled(kind)
    deliver(kind, ranks)
    assert [each.wrong() for each in ranks] == [0] * RANKS
    ranks[1]._arrived[-7] += 1
    ranks[2]._arrived[3] = float("nan")
    assert [each.wrong() for each in ranks] == [0, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_another_rank_or_none_at_all_is_wrong(kind: Collective) -> None:
    ranks = filled(kind)
    if kind != "all_reduce":  # which works in place
        assert all(each.wrong() == each._arrived.numel() for each in ranks)
    deliver(kind, ranks)
    for each in ranks:
        arrived = each._arrived.clone()
        each._arrived.copy_(arrived.roll(1))
        assert each.wrong() > 0.9 * arrived.numel()
        each._arrived.copy_(arrived.roll(each.count))
        assert each.wrong() == (0 if kind == "reduce_scatter" else arrived.numel())


def test_sizes_are_those_of_the_whole_tensor() -> None:
    assert [each.num_bytes for each in filled("all_gather")] == [1200] * RANKS
    assert filled("all_gather")[0]._sent.nbytes == 400
    assert filled("reduce_scatter")[0]._arrived.nbytes == 400
