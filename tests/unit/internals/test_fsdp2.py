"""What shardwise takes for granted of FSDP2: one test for each assumption, on every torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

from shardwise.internals import fsdp2
from shardwise.internals.byte_params import allow_bytes
from shardwise.internals.fsdp2_state import reduce_gradients
from shardwise.internals.parts import Changed
from shardwise.parallel.comm import reduce_in_place
from shardwise.tunnel.world import rank_zero_of

CPU = torch.device("cpu")


class Asked:
    """FSDP2's `Comm`: notes what memory it is asked for, and on which stream."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Any]] = []
        self.made: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.asked.append((size[0], torch.cpu.current_stream()))
        self.made.append(torch.empty(*size, dtype=dtype, device=device))
        return self.made[-1]

    def __call__(self, output_tensor: Tensor, **_: Any) -> None:
        self.outputs.append(output_tensor)


@pytest.fixture(params=[1, 4])
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    with rank_zero_of(request.param):
        yield request.param


@pytest.fixture
def lone() -> Iterator[None]:
    with rank_zero_of(1):
        yield


def sharded(world: int) -> Any:
    torch.manual_seed(0)
    layer = nn.Linear(8, 12)
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    assert isinstance(layer, FSDPModule)
    return layer


def gradients(layer: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in layer.parameters()]
    return [grad.to_local() for grad in grads if isinstance(grad, DTensor)]


def test_the_operators_take_what_our_kernels_take() -> None:
    fsdp2.check_copies()
    fsdp2.check_gathers()


def test_an_operator_with_another_signature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsdp2.SCHEMAS, "chunk_cat", "(Tensor[] tensors) -> ()")
    with pytest.raises(Changed, match="fsdp::chunk_cat"):
        fsdp2.check_copies()


def test_a_kernel_that_declines_leaves_the_copy_to_fsdp2() -> None:
    seen: list[int] = []

    def decline(tensors: list[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> Any:
        seen.append(num_chunks)
        return NotImplemented

    # Held here alone: without its library FSDP2's own kernel is the operator's again.
    library = fsdp2.replace_copy.__wrapped__("chunk_cat", decline, "cpu")
    out = torch.full((2, 4), -1.0)
    torch.ops.fsdp.chunk_cat([torch.arange(6.0).view(3, 2)], dim=0, num_chunks=2, out=out)
    assert (out.tolist(), seen) == ([[0, 1, 2, 3], [4, 5, 0, 0]], [2])
    del library
    gc.collect()
    torch.ops.fsdp.chunk_cat([torch.ones(4, 2)], dim=0, num_chunks=2, out=out)
    assert (out.tolist(), seen) == ([[1, 1, 1, 1]] * 2, [2])


def test_the_input_of_a_reduction_is_asked_for_where_it_is_computed(world: int) -> None:
    computes, layer, comm = torch.cpu.current_stream(), sharded(world), Asked()
    layer.set_custom_reduce_scatter(comm)
    for _ in range(2):
        layer(torch.ones(2, 8)).sum().backward()
    (taken, on), (given, reduces) = comm.asked[:2]
    assert comm.asked == [(taken, on), (given, reduces)] * 2
    assert taken == given * world
    assert on == computes != reduces


def test_what_fsdp2_gathers_into_is_the_memory_that_it_was_given() -> None:
    with rank_zero_of(4):
        layer, comm = sharded(4), Asked()
        layer.set_custom_all_gather(comm)
        layer(torch.ones(2, 8)).sum().backward()
    assert len(comm.outputs) == len(comm.made) == 1
    assert fsdp2.base_of(comm.outputs[0]) is comm.made[0]
    assert fsdp2.base_of(comm.made[0].expand(1, -1).view(4, -1)) is comm.made[0]


@pytest.mark.usefixtures("lone")
def test_one_memory_for_both_sides_of_a_lone_reduction_gives_the_same_gradients() -> None:
    plain, ours = sharded(1), sharded(1)
    reduce_in_place(ours, CPU)
    for inputs in torch.randn(2, 2, 8):  # the second pass accumulates
        for layer in (plain, ours):
            layer(inputs).square().sum().backward()
        assert all(map(torch.equal, gradients(ours), gradients(plain)))


@pytest.mark.usefixtures("lone")
def test_a_backward_that_broke_off_never_hands_out_the_memory_of_gradients() -> None:
    plain, ours = sharded(1), sharded(1)
    comms: list[Any] = []
    ours.set_custom_reduce_scatter, kept = comms.append, ours.set_custom_reduce_scatter
    reduce_in_place(ours, CPU)
    kept(comms[0])
    # Before it broke off it had asked for as much as the next one will.
    comms[0].allocate((108,), dtype=torch.float32, device=CPU)
    for inputs in torch.randn(3, 2, 8):  # gradients accumulate
        for layer in (plain, ours):
            layer(inputs).square().sum().backward()
        assert all(map(torch.equal, gradients(ours), gradients(plain)))


@pytest.mark.usefixtures("lone")
def test_a_lone_reduction_copies_nothing() -> None:
    layer, comm = sharded(1), Asked()
    layer.set_custom_reduce_scatter(comm)
    layer(torch.ones(2, 8)).sum().backward()
    # FSDP2's own way: the gradients are views of the output, not of the input.
    taken, given = comm.made
    addresses = {grad.untyped_storage().data_ptr() for grad in gradients(layer)}
    assert addresses == {given.untyped_storage().data_ptr()}
    assert taken.untyped_storage().data_ptr() not in addresses


def test_bytes_are_sharded_and_gathered_as_they_are() -> None:
    """Mixed precision casts floats alone, whatever is in the unit besides."""
    allow_bytes()
    with rank_zero_of(4):
        layer = nn.Linear(8, 12)
        packed = torch.arange(96, dtype=torch.uint8).view(12, 8)
        layer.register_parameter("packed", nn.Parameter(packed, requires_grad=False))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,)), mp_policy=policy)
        state: Any = layer
        assert (state.packed.dtype, state.packed.requires_grad) == (torch.uint8, False)
        assert torch.equal(state.packed.to_local(), packed[:3])
        state.unshard()
        assert (state.weight.dtype, state.packed.dtype) == (torch.bfloat16, torch.uint8)
        assert state.packed.shape == packed.shape
        state.reshard()


def test_gradients_of_several_backwards_are_reduced_by_a_call(lone: None) -> None:
    layer, rows = sharded(1), torch.randn(4, 8)
    reduce_in_place(layer, CPU)
    layer.set_requires_gradient_sync(False)
    layer.set_is_last_backward(False)
    for _ in range(3):
        layer(rows).sum().backward()
    assert all(param.grad is None for param in layer.parameters() if isinstance(param, DTensor))
    reduce_gradients(layer)
    assert isinstance(layer.weight.grad, DTensor)
    expected = 3 * rows.sum(0).expand(12, 8)
    torch.testing.assert_close(layer.weight.grad.full_tensor(), expected)
