"""AdamW whose moments pass through the device in pages: the numbers of torch's, and copies that
wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from counting_streams import Device, Past, is_before
from shardwise.training import paged
from shardwise.training.optim import ShardAdamW
from shardwise.training.paged import PagedAdamW, Pager, cut_pages

# Pages of 128 numbers: a matrix is in several of them, and vectors share one.
SIZES = ((40, 16), (7,), (3,), (130,), (0, 4), (128,))


class SmallPages(PagedAdamW):
    page_numbers = 128


def train(kind: type[ShardAdamW], steps: int = 4, found_inf: int | None = None) -> Any:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer = kind(params, lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape)
        optimizer.grad_scale = torch.tensor(1.5)
        optimizer.found_inf = torch.tensor(float(step == found_inf))
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("found_inf", [None, 2])
def test_numbers_are_those_of_torch(found_inf: int | None) -> None:
    (wanted, plain), (found, small) = (
        train(kind, found_inf=found_inf) for kind in (ShardAdamW, SmallPages)
    )
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)
        for name, tensor in plain.state[one].items():
            assert torch.equal(tensor, small.state[other][name]), name
    assert plain.state[wanted[0]]["step"] == (4 if found_inf is None else 3)


def test_pages_hold_every_number_once() -> None:
    params, optimizer = train(SmallPages)
    states = [optimizer.state[param] for param in params]
    pages = cut_pages(params, [param.grad for param in params], states, 128)
    parts = [part for page in pages for part in page]
    assert sum(part.param.numel() for part in parts) == sum(p.numel() for p in params)
    assert max(sum(map(paged._room, page)) for page in pages) == 128
    assert len(pages) < len(parts)


def test_a_loaded_state_goes_on_as_the_first_one_did() -> None:
    wanted, _ = train(SmallPages, steps=4)
    _, half = train(SmallPages, steps=2)
    state = half.state_dict()
    params, optimizer = train(SmallPages, steps=2)
    for values in optimizer.state.values():
        for tensor in values.values():
            tensor.fill_(9.0)
    places = [values["exp_avg"].data_ptr() for values in optimizer.state.values()]
    optimizer.load_state_dict(state)
    assert places == [values["exp_avg"].data_ptr() for values in optimizer.state.values()]
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape)
        optimizer.step()
    assert all(map(torch.equal, params, wanted))


def test_copies_and_updates_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    device, log, updates = Device(), list[tuple[str, Past]](), list[Past]()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    original = Pager._copy

    def copy(self: Any, stream: Any, pairs: Any) -> Any:
        log.append((stream.name, stream.work()))
        return original(self, stream, pairs)

    monkeypatch.setattr(Pager, "_copy", copy)
    params, optimizer = train(SmallPages, steps=0)
    for param in params:
        param.grad = torch.randn(param.shape)
    update = SmallPages._update

    def updated(self: Any, *given: Any) -> None:
        updates.append(device.compute.work())
        update(self, *given)

    monkeypatch.setattr(SmallPages, "_update", updated)
    for _ in range(2):
        optimizer.step()
    home, away = ([past for name, past in log if name == f"copies {at}"] for at in (0, 1))
    count = len(home)
    assert count == len(away) and 2 * count == len(updates) and count > 4
    for number in range(count):
        # A page has come before it is updated, and is updated before it goes.
        assert is_before(home[number], updates[number])
        assert is_before(updates[number], away[number])
    for number in range(2, count):
        # The page before the last one has left the place that this one comes to.
        assert is_before(away[number - 2], home[number])
        assert not is_before(away[number - 1], home[number])
    # What follows the step, and the next step's copies, come after all of them.
    assert is_before(away[count - 1], updates[count])
