from __future__ import annotations

import traceback

import pytest
import torch

from shardwise.model.seeds import seed_generators


def numbers(key: str) -> list[float]:
    seed_generators(key)
    return [float(x) for x in torch.rand(3)]


def test_a_key_gives_the_same_numbers_and_another_key_others() -> None:
    with torch.random.fork_rng(devices=[]):
        assert numbers("0/model.norm") == numbers("0/model.norm") != numbers("1/model.norm")


def test_no_call_stack_is_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` does so for each kind of device that is not in use."""

    def refuse() -> None:
        raise AssertionError("a call stack was formatted")

    monkeypatch.setattr(traceback, "format_stack", refuse)
    with torch.random.fork_rng(devices=[]):
        seed_generators("0/0/0")
