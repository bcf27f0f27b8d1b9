"""When fragments are sent and join, and what int8 makes of numbers."""

from __future__ import annotations

import pytest
import torch

from shardwise.parallel.twins import decode, encode
from shardwise.plan.exchange_bytes import INT8_BLOCK
from shardwise.training.outer import Timetable


def days(table: Timetable, steps: int) -> tuple[list[int | None], list[int | None]]:
    span = range(1, steps + 1)
    return [table.is_sent_after(s) for s in span], [table.joins_after(s) for s in span]


def test_a_whole_model_joins_after_every_so_many_steps() -> None:
    sent, joins = days(Timetable(3, 1, 0), 6)
    assert sent == joins == [None, None, 0, None, None, 0]


def test_fragments_are_sent_apart_and_ahead() -> None:
    table = Timetable(6, 2, 2)
    sent, joins = days(table, 12)
    assert joins == [None, None, 0, None, None, 1] * 2
    assert sent == [0, None, None, 1, None, None] * 2
    assert [step for step in range(1, 13) if table.is_whole_after(step)] == [6, 12]


def test_int8_is_within_half_a_step_of_its_block() -> None:
    torch.manual_seed(0)
    numbers = torch.randn(4 * INT8_BLOCK) * torch.logspace(-6, 3, 4).repeat_interleave(INT8_BLOCK)
    numbers[:INT8_BLOCK] = 0
    sent = encode(numbers)
    assert sent.numel() == 4 * (INT8_BLOCK + 4)
    found = decode(sent)
    largest = numbers.view(4, -1).abs().amax(1, keepdim=True)
    wrong = (found - numbers).view(4, -1).abs()
    assert (wrong <= largest / 127 / 2 * 1.001).all()
    assert (found[:INT8_BLOCK] == 0).all()
    assert found.dtype == numbers.dtype == torch.float32


@pytest.mark.parametrize("scale", [1e-38, 1e38])
def test_int8_keeps_the_smallest_and_the_largest_numbers(scale: float) -> None:
    numbers = torch.linspace(-1, 1, INT8_BLOCK) * scale
    assert decode(encode(numbers)).isfinite().all()
