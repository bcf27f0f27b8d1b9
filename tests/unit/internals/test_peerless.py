"""A process group without peers, and tensors without data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.internals.peerless import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    no_dispatch,
)
from shardwise.tunnel.world import rank_zero_of


def test_one_process_is_a_rank_of_many_and_its_collectives_return_at_once() -> None:
    with rank_zero_of(512):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 512)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1, 1]


def test_a_fake_tensor_has_a_device_and_a_storage_and_no_values() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = torch.empty(2**45)
        assert type(made) is FakeTensor
        assert made.fake_device == torch.device("cpu")
        assert made[1:].untyped_storage() is made.untyped_storage()
        with pytest.raises(DataDependentOutputException):
            made.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            made.nonzero()


def test_a_fake_tensor_is_made_of_a_meta_tensor() -> None:
    with FakeTensorMode() as mode, no_dispatch():
        made = FakeTensor(mode, torch.empty(3, device="meta"), torch.device("cpu"))
    assert (made.shape, made.fake_device, made.fake_mode) == ((3,), torch.device("cpu"), mode)
