"""Ranks that divide sequences compute the attention of whole ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_pool import Ranks
from split_ranks import IN_PARTS, compare_attentions

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]


@pytest.mark.parametrize("world", [2, 4])
def test_every_kernel_sees_what_whole_sequences_show(ranks: Pools, world: int) -> None:
    _check(ranks(world), "sdpa", IN_PARTS, "eager", "flash_attention_4")


@pytest.mark.long
def test_tiles_see_what_whole_sequences_show(ranks: Pools) -> None:
    """FlexAttention takes a second for each mask on a CPU."""
    _check(ranks(2), "flex_attention")


def _check(ranks: Ranks, *kernels: str) -> None:
    for found in ranks.run(compare_attentions, kernels):
        assert len(found) == 14 * len(kernels)
        assert {name: worst for name, worst in found.items() if not worst <= 1e-5} == {}
