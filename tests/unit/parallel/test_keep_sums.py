"""What compiled blocks keep for backward: the residual stream, not what was added to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import aot_module, min_cut_rematerialization_partition, nop
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.parallel.compile import apply_compile
from shardwise.parallel.keep_sums import KeepSums

WIDTH = 16


class Block(nn.Module):
    """x + a layer of its norm, twice."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.after = after

    def added(self, x: Tensor) -> Tensor:
        added: Tensor = self.after(self.layers[0](self.norms[0](x)))
        return added

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.added(x)
        x = x + self.layers[1](torch.tanh(self.norms[1](x)))
        return x


def partitioned(block: Block, *, keep_sums: bool) -> Any:
    """As torch.compile does, without the time that it takes to write kernels."""

    def partition(joint: Any, *args: Any, **kwargs: Any) -> Any:
        if keep_sums:
            KeepSums()(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    return aot_module(block, fw_compiler=nop, partition_fn=partition)


def kept(run: Any, x: Tensor) -> list[Tensor]:
    """What a forward leaves for backward, of the size of `x`."""
    found: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda tensor: tensor):
        run(x)
    return [each.detach().view_as(x) for each in found if each.numel() == x.numel()]


def has(tensors: list[Tensor], wanted: Tensor) -> bool:
    return any(torch.allclose(each, wanted, atol=1e-6) for each in tensors)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.manual_seed(1)).requires_grad_()


def test_a_sum_is_kept_and_not_what_was_added(x: Tensor) -> None:
    block = Block(nn.Identity())
    added = block.added(x)
    plain = kept(partitioned(block, keep_sums=False), x)
    found = kept(partitioned(block, keep_sums=True), x)
    assert has(plain, added) and not has(plain, x + added), "the compiler has learnt it"
    assert has(found, x + added) and not has(found, added)
    assert len(found) == len(plain)


class Adapted(nn.Module):
    """A layer and its adapter."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.narrow, self.wide = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.wide(self.narrow(x))  # type: ignore[no-any-return]


def test_the_sum_is_kept_where_layers_have_adapters(x: Tensor) -> None:
    block = Block(nn.Identity())
    block.layers = nn.ModuleList(map(Adapted, block.layers))
    added = block.added(x)
    plain = kept(partitioned(block, keep_sums=False), x)
    found = kept(partitioned(block, keep_sums=True), x)
    assert has(found, x + added) and not has(found, added)
    assert len(found) <= len(plain)


def test_what_is_added_after_a_norm_is_left_to_the_compiler(x: Tensor) -> None:
    """Its norm needs it as well, so that keeping the sum would be one tensor more."""
    block = Block(nn.RMSNorm(WIDTH))
    plain = kept(partitioned(block, keep_sums=False), x)
    found = kept(partitioned(block, keep_sums=True), x)
    assert len(found) == len(plain)
    assert all(map(torch.equal, found, plain))


def test_torch_compile_runs_the_pass(x: Tensor) -> None:
    block = Block(nn.Identity())
    added = block.added(x)
    block(x).square().sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    apply_compile([block])
    found = kept(block, x)
    assert has(found, x + added) and not has(found, added)
    block(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-6)
