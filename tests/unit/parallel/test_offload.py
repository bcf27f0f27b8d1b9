"""Activations in host memory: the same gradients, the device's copies gone, nothing else moved."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.parallel import offload
from shardwise.parallel.compile import apply_compile
from shardwise.parallel.offload import Offloader, apply_offload
from shardwise.parallel.remat import apply_remat
from shardwise.plan.host_activations import chosen
from traced import without_kernels

CPU = torch.device("cpu")
WIDTH, TOKENS = 64, 256  # 64 KiB each


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(nn.functional.silu(self.up(self.norm(hidden) * scale)))
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, scale=scale)
        return hidden


@pytest.fixture(scope="module")
def plain() -> Stack:
    torch.manual_seed(0)
    return Stack()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, list[Tensor]]]]:
    """The blocks that were sent, with copies of what they sent."""
    seen: list[tuple[int, list[Tensor]]] = []
    original = Offloader.send

    def send(self: Offloader, block: int) -> None:
        seen.append((block, [tensor.clone() for tensor in self._loads[block].tensors]))
        original(self, block)

    monkeypatch.setattr(Offloader, "send", send)
    yield seen


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(TOKENS, WIDTH, generator=made) for _ in range(2))  # type: ignore[return-value]


def step(model: nn.Module, seed: int) -> list[Tensor]:
    model.zero_grad()
    loss = model(*inputs(seed)).square().sum()
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]


# A chunk holds several tensors, or a part of one.
@pytest.mark.parametrize("chunk", [2**27, 100_000])
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_gradients_are_the_same(
    plain: Stack,
    sent: list[tuple[int, list[Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
    remat: str,
    share: float,
    chunk: int,
) -> None:
    monkeypatch.setattr(offload, "_CHUNK_BYTES", chunk)
    model = deepcopy(plain)
    apply_remat(list(model.blocks), remat)
    apply_offload(list(model.blocks), share, CPU)
    for seed in (1, 2):
        pairs = zip(step(model, seed), step(plain, seed), strict=True)
        assert all(torch.equal(found, expected) for found, expected in pairs)
    assert [block for block, _ in sent] == 2 * chosen(6, share)


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_a_compiled_block_keeps_travels(
    plain: Stack, sent: list[tuple[int, list[Tensor]]], kernels: bool
) -> None:
    model = deepcopy(plain)
    with nullcontext() if kernels else without_kernels():
        apply_compile(list(model.blocks))
    apply_offload(list(model.blocks), 0.5, CPU)
    for found, expected in zip(step(model, 1), step(plain, 1), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(len(tensors) >= 3 for _, tensors in sent)


def test_parameters_and_what_all_blocks_are_given_stay(
    plain: Stack, sent: list[tuple[int, list[Tensor]]]
) -> None:
    model = deepcopy(plain)
    # Of a size that travels, were they a block's own.
    for block in model.blocks:
        block.norm.weight = nn.Parameter(torch.rand(TOKENS, WIDTH))
        block.norm.normalized_shape = (TOKENS, WIDTH)
    apply_offload(list(model.blocks), 0.5, CPU)
    hidden, scale = inputs(1)
    model(hidden, scale).sum().backward()
    mine = [scale, *model.parameters()]
    for _, tensors in sent:
        assert tensors and not any(
            tensor.shape == other.shape and torch.equal(tensor, other)
            for tensor in tensors
            for other in mine
        )


# Where the last blocks stay all have left when forward ends; else the last when backward begins.
@pytest.mark.parametrize(("share", "stays"), [(0.5, set()), (1.0, {5})])
def test_the_device_lets_go_of_what_has_left(
    plain: Stack, monkeypatch: pytest.MonkeyPatch, share: float, stays: set[int]
) -> None:
    model = deepcopy(plain)
    apply_offload(list(model.blocks), share, CPU)
    held: dict[int, list[weakref.ref[Tensor]]] = {}
    original = Offloader.send

    def send(self: Offloader, block: int) -> None:
        held[block] = [weakref.ref(tensor) for tensor in self._loads[block].tensors]
        original(self, block)

    monkeypatch.setattr(Offloader, "send", send)
    loss = model(*inputs(1)).sum()
    alive = {block: [ref() is not None for ref in refs] for block, refs in held.items()}
    assert all(alive.values()) and len(alive) == round(6 * share)
    assert {block for block, refs in alive.items() if any(refs)} == stays
    assert all(all(alive[block]) for block in stays)
    loss.backward()
    assert not any(ref() is not None for refs in held.values() for ref in refs)


def test_no_gradient_no_travel(plain: Stack, sent: list[tuple[int, list[Tensor]]]) -> None:
    model = deepcopy(plain)
    apply_offload(list(model.blocks), 1.0, CPU)
    with torch.no_grad():
        assert torch.equal(model(*inputs(1)), plain(*inputs(1)))
    assert not sent


@pytest.mark.parametrize("again", ["forward", "backward"])
def test_what_is_no_longer_there_is_refused(plain: Stack, again: str) -> None:
    model = deepcopy(plain)
    apply_offload(list(model.blocks), 0.5, CPU)
    loss = model(*inputs(1)).sum()
    if again == "forward":
        model(*inputs(2))
    else:
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward after each forward"):
        loss.backward()


@pytest.mark.parametrize(
    ("num_blocks", "share", "expected"),
    [
        (6, 0.5, [0, 1, 2]),
        (32, 0.25, [0, 3, 7, 10, 14, 17, 21, 24]),
        (4, 1.0, [0, 1, 2, 3]),
        (8, 0.05, []),
    ],
)
def test_chosen_blocks_are_spread_from_the_first_on(
    num_blocks: int, share: float, expected: list[int]
) -> None:
    assert chosen(num_blocks, share) == expected


@pytest.mark.parametrize(
    ("tensor", "travels"),
    [
        (torch.empty(256, 64), True),
        (torch.empty(64, 256).t(), True),
        (torch.empty(16, 16, 64).transpose(0, 1), True),
        (torch.empty(255, 64), False),
        (torch.empty(256, 128)[:, :64], False),
        (torch.empty(1, 64).expand(256, 64), False),
    ],
    ids=["large", "turned", "permuted", "small", "with gaps", "repeated"],
)
def test_only_large_tensors_without_gaps_travel(tensor: Any, travels: bool) -> None:
    assert offload._may_travel(tensor) is travels


def test_a_host_without_room_is_said(plain: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "memory_left", lambda: 2**30)
    stack = deepcopy(plain)
    apply_offload(list(stack.blocks), 0.5, CPU)
    with pytest.raises(UserError, match=r"no room in host memory: 1\.0 GiB of it are left"):
        stack(torch.randn(TOKENS, WIDTH, requires_grad=True), torch.ones(WIDTH))
