"""AdamW whose moments are in host memory, and pass through the device in pages.

Parameters and gradients stay on the device. While a page is updated there, the next one comes and
the last one goes, on two streams of their own. The numbers are those of torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.facts.paging import PAGE_NUMBERS
from shardwise.internals.functions import add_to_each
from shardwise.parallel.torchao_float8 import bare, own_part
from shardwise.training.optim import MOMENTS, ShardAdamW

# Kernels read several numbers at a time from addresses that are multiples of their size.
_ALIGNED = 64


class PagePart(NamedTuple):
    """Part of a parameter, as a row of numbers."""

    param: Tensor
    grad: Tensor
    in_host: tuple[Tensor, ...]
    """Its moments."""

    steps: Tensor
    """The updates of the parameter so far."""


Page = list[PagePart]


class PagedAdamW(ShardAdamW):
    """torch's AdamW and its state, which lies in host memory."""

    page_numbers = PAGE_NUMBERS

    def update_params(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Update parameters of one group, page by page."""
        states = [self.state_of(param) for param in params]
        pages = cut_pages(params, grads, states, self.page_numbers)
        size = max((sum(map(_room, page)) for page in pages), default=0)
        Pager(params[0].device, size).run(
            pages, lambda page, moments: self._update(group, page, moments)
        )
        counts = [state["step"] for state in states]
        skipped = torch.zeros_like(counts[0]) if self.found_inf is None else self.found_inf
        add_to_each(counts, [1 - skipped] * len(counts))

    def state_of(self, param: Tensor) -> dict[str, Tensor]:
        """The initial state. The count stays on the device."""
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in MOMENTS:
                # Copies from and to other host memory would block.
                state[name] = torch.zeros_like(bare(param), device="cpu", pin_memory=param.is_cuda)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the state to where it is. torch would move all moments to the device first."""
        saved, own = (
            chain.from_iterable(group["params"] for group in groups)
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for key, param in zip(saved, own, strict=True):
            if key not in state_dict["state"]:
                continue
            for name, tensor in self.state_of(param).items():
                tensor.copy_(state_dict["state"][key][name])

    def settle(self) -> None:
        """Wait until the last page is in host memory."""
        for param in self.state:
            if param.is_cuda:
                torch.cuda.current_stream(param.device).synchronize()
                return

    def _update(self, group: dict[str, Any], page: Page, moments: Sequence[list[Tensor]]) -> None:
        params, grads = [part.param for part in page], [part.grad for part in page]
        means, squares = moments
        # A call counts up, and a parameter may have several parts.
        steps = [part.steps.clone() for part in page]
        self.compute(group, params, grads, means, squares, steps)


def cut_pages(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    most: int,
) -> list[Page]:
    """This rank's parts, cut into pages of at most so many numbers."""
    pages: list[Page] = []
    left = 0
    for param, grad, state in zip(params, grads, states, strict=True):
        rows = [own_part(each).view(-1) for each in (param, grad, *(state[m] for m in MOMENTS))]
        for slices in zip(*(row.split(most) for row in rows), strict=True):
            own, its_grad, *in_host = slices
            if not own.numel():
                continue
            part = PagePart(own, its_grad, tuple(in_host), state["step"])
            if _room(part) > left:
                pages.append([])
                left = max(most, _room(part))
            pages[-1].append(part)
            left -= _room(part)
    return pages


class Pager:
    """Two places on the device that pages take turns in, and the streams of their copies."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._module: Any = torch.get_device_module(device)
        self._home, self._away = self._module.Stream(), self._module.Stream()
        self._places = [torch.empty(len(MOMENTS), size, device=device) for _ in range(2)]
        self._left: list[Any] = [None, None]

    def run(
        self, pages: Sequence[Page], update: Callable[[Page, Sequence[list[Tensor]]], None]
    ) -> None:
        """Bring each page, update it, and take it back. The compute stream ends after all of
        it."""
        compute = self._module.current_stream()
        # Others may have used the places until now, and host memory may still be written to.
        self._home.wait_stream(compute)
        for number, page in enumerate(pages):
            turn = number % 2
            if self._left[turn] is not None:
                self._home.wait_event(self._left[turn])
            moments = [_lay_out(page, row) for row in self._places[turn]]
            pairs = [*_pairs(page, moments)]
            self._copy(self._home, [(here, there) for there, here in pairs])
            compute.wait_stream(self._home)
            update(page, moments)
            self._away.wait_stream(compute)
            self._left[turn] = self._copy(self._away, pairs)
        compute.wait_stream(self._away)

    def _copy(self, stream: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Copy each second tensor to each first one. Returns the event after that."""
        with self._module.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()


def _lay_out(page: Page, row: Tensor) -> list[Tensor]:
    """The places of the parts of a page in one row."""
    found, at = [], 0
    for part in page:
        found.append(row[at : at + part.param.numel()])
        at += _room(part)
    return found


def _pairs(page: Page, moments: Sequence[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """(in host memory, on the device) of every moment of every part."""
    return [
        (there, here)
        for part, *places in zip(page, *moments, strict=True)
        for there, here in zip(part.in_host, places, strict=True)
    ]


def _room(part: PagePart) -> int:
    return -(-part.param.numel() // _ALIGNED) * _ALIGNED
