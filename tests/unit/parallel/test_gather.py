"""Gathers straight into parameters: nothing is copied out, and FSDP2 still works as they expect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, init_device_mesh

from shardwise.internals.fsdp2 import replace_copy
from shardwise.kernels import unit_copies
from shardwise.parallel import gather
from shardwise.parallel.comm import Carrier
from shardwise.parallel.gather import IntoParameters, can_gather_into
from shardwise.tunnel.world import rank_zero_of

WORLD = 4


@pytest.fixture
def world() -> Iterator[None]:
    with rank_zero_of(WORLD):
        yield


class Gathers:
    """Other ranks have this one's shards, and 1 for each rank added."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def __call__(self, outputs: list[Tensor], inputs: list[Tensor], **how: Any) -> None:
        self.sizes.append([each.numel() for each in outputs])
        for output, shard in zip(outputs, inputs, strict=True):
            own = shard.clone().view(1, -1)
            output.view(WORLD, -1).copy_(own + torch.arange(WORLD)[:, None])


def sharded(gathers: Gathers) -> nn.Sequential:
    replace_copy("all_gather_copy_in", gather.keep_shards, "cpu")
    replace_copy("split_with_sizes_copy", gather.copy_unless_there, "cpu")
    torch.manual_seed(0)
    # Rows that the ranks divide, and rows that they do not.
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6))
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
        assert isinstance(layer, FSDPModule)
        layer.set_custom_all_gather(IntoParameters(torch.empty, gathers))  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    return model


def whole_params(model: nn.Sequential) -> list[Tensor]:
    """What forward computes with, of each layer in turn."""
    found: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, _: found.extend(each.detach().clone() for each in module.parameters())
        )
        for layer in model
    ]
    model(torch.ones(2, 8)).sum().backward()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.usefixtures("world")
def test_the_second_gather_finds_the_places_and_copies_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[int] = []
    copy_out = unit_copies.split_with_sizes_copy
    monkeypatch.setattr(
        unit_copies,
        "split_with_sizes_copy",
        lambda *given, **named: copies.append(1) or copy_out(*given, **named),
    )
    gathers = Gathers()
    model = sharded(gathers)
    first = whole_params(model)
    second = whole_params(model)
    assert all(map(torch.equal, first, second))
    assert len(copies) == 2
    # Forward and backward gather both layers; 6 rows are padded to 8.
    flat, placed = [[108], [104]], [[96, 12], [96, 8]]
    assert gathers.sizes == [*flat, *placed[::-1], *placed, *placed[::-1]]


@pytest.mark.usefixtures("world")
def test_new_values_arrive_and_memory_is_given_back() -> None:
    model = sharded(Gathers())
    before = whole_params(model)
    model.zero_grad()
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().add_(5)  # type: ignore[attr-defined]
    after = whole_params(model)
    assert all(torch.allclose(new, old + 5) for new, old in zip(after, before, strict=True))
    places = [place for layer in model for place in layer_places(layer)]
    assert len(places) == 4
    assert not any(place.untyped_storage().size() for place in places)
    # FSDP2 has let go of all buffers, and so of the shards that were kept beside them.
    assert len(gather._GATHERS) == 0


def layer_places(layer: nn.Module) -> list[Tensor]:
    """By way of a name that is FSDP2's own: nothing public shows memory that it has given back."""
    group = layer._get_fsdp_state()._fsdp_param_group  # type: ignore[operator,union-attr]
    return [place for param in group.fsdp_params for place in param.all_gather_outputs]


@pytest.mark.usefixtures("world")
def test_only_rows_are_gathered_in_place() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    rows, columns = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    fully_shard(rows, mesh=mesh)
    fully_shard(columns, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    assert can_gather_into([rows])
    assert not can_gather_into([rows, columns])


@pytest.mark.usefixtures("world")
def test_memory_that_moved_is_noticed() -> None:
    model = sharded(Gathers())
    whole_params(model)
    place = layer_places(model[0])[0]
    place.set_(torch.empty_like(place).untyped_storage())
    with pytest.raises(AssertionError, match="other memory for parameters"):
        whole_params(model)


def test_many_are_gathered_in_one_call() -> None:
    assert hasattr(dist.ProcessGroup, "allgather_into_tensor_coalesced")


@pytest.mark.parametrize("has_work", [True, False])
def test_a_gather_is_done_with_or_without_work_to_wait_for(has_work: bool) -> None:
    """NCCL has none for calls that are not asynchronous, gloo has."""
    work = Mock(dist.Work) if has_work else None
    group = Mock(dist.ProcessGroup)
    group.allgather_into_tensor_coalesced.return_value = work
    inputs = [torch.zeros(2), torch.zeros(3)]
    assert Carrier().all_gather("block", inputs, inputs, group) is None
    assert work is None or work.wait.called
    assert Carrier().all_gather("block", inputs, inputs, group, async_op=True) is work
