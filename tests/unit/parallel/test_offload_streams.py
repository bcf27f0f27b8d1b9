"""The order that streams keep while activations travel, on streams that only keep count.

On a CPU nothing runs beside anything else, so a wait that is missing would not show. Here
every stream knows what has happened before it, and every copy says whether it came too early.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counting_streams import Device, Past, is_before
from shardwise.parallel import offload
from shardwise.parallel.offload import Offloader

WIDTH, TOKENS = 64, 256


class Side:
    """A piece of memory that writes down which copies touched it."""

    def __init__(self, piece: Tensor, log: list[tuple[str, Past]], device: Device) -> None:
        self.piece, self.log, self.device = piece, log, device

    def copy_(self, source: Side, non_blocking: bool) -> None:
        assert non_blocking
        past = self.device.current.work()
        away = self.device.current is self.device.made[0]
        self.log.append(("away" if away else "home", past))
        self.piece.copy_(source.piece)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device and the log of its copies."""
    device, log = Device(), list[tuple[str, Past]]()
    original = offload._pieces

    def pieces(*given: Any) -> Iterator[tuple[Side, Side]]:
        for pair in original(*given):
            in_host, on_device = (Side(piece, log, device) for piece in pair)
            yield in_host, on_device

    monkeypatch.setattr(offload, "_pieces", pieces)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return SimpleNamespace(device=device, log=log)


class Layer(nn.Module):
    """Computes on the device's stream, forward and backward."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.device, self.made, self.used = device, list[Past](), list[Past]()

    def forward(self, hidden: Tensor) -> Tensor:
        out = hidden @ self.weight
        self.made.append(self.device.compute.work())
        out.register_hook(lambda _: self.used.append(self.device.compute.work()))
        return out.tanh()


def test_copies_and_compute_wait_for_each_other(
    seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[tuple[Past, Past]] = []
    original = Offloader._let_go

    def let_go(self: Offloader, blocks: list[int]) -> None:
        sent = [self._leaving[block].moved for block in blocks]
        original(self, blocks)
        freed.extend((event, dict(seen.device.compute.past)) for event in sent)

    monkeypatch.setattr(Offloader, "_let_go", let_go)
    layers = [Layer(seen.device) for _ in range(4)]
    offload.apply_offload([*layers], 0.5, torch.device("cpu"))
    for _ in range(2):
        hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
        for layer in layers:
            hidden = layer(hidden)
        hidden.sum().backward()
    away = [past for way, past in seen.log if way == "away"]
    home = [past for way, past in seen.log if way == "home"]
    per_step = len(away) // 2
    assert len(away) == len(home) == 2 * per_step > 2
    # What leaves has been computed, and is freed for what comes after its copy.
    assert is_before(layers[0].made[0], away[0]) and is_before(
        layers[1].made[0], away[per_step - 1]
    )
    assert len(freed) == 4 and all(is_before(event, past) for event, past in freed)
    assert all(any(is_before(copy, event) for event, _ in freed) for copy in away)
    # What comes back has left, its place is no longer in use, and it is there when it is used.
    assert is_before(away[per_step - 1], home[0])
    assert is_before(layers[3].made[0], home[0])
    assert is_before(home[0], layers[1].used[0])
    assert is_before(home[per_step - 1], layers[0].used[0])
    # The next step's copies write over what has come back.
    assert is_before(home[per_step - 1], away[per_step])


def send_one(offloader: Offloader) -> Any:
    """A tensor that a block saves goes away; returns what would ask for it."""
    with offloader.packing(0, set()):
        out = torch.randn(TOKENS, WIDTH, requires_grad=True).exp()
    offloader.send(0)
    return out.grad_fn


def test_what_is_asked_for_before_its_time_has_left(seen: SimpleNamespace) -> None:
    node = send_one(Offloader(torch.device("cpu"), patience=1, last=0))
    assert node._saved_result.shape == (TOKENS, WIDTH)
    (_, left), (_, came) = seen.log
    assert is_before(left, came) and is_before(came, seen.device.compute.past)


def test_what_nobody_asked_for_has_come_back_before_its_place_is_taken(
    seen: SimpleNamespace,
) -> None:
    offloader = Offloader(torch.device("cpu"), patience=1, last=0)
    send_one(offloader)
    offloader.arrive(0)
    send_one(offloader)
    (_, _), (_, came), (_, next_left) = seen.log
    assert is_before(came, next_left)
