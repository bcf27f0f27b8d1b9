"""Experts that every token goes through, beside those that a router chooses.

Families add up what both make of a token, each in code of its own and in an order of its own. Here
what the shared ones make is computed apart: in the family's sum they stand for zero, and whoever
has computed them adds the result to that of the other experts. That this gives the same is found
out by running the family's own code over a few tokens, so a block that calls them on another
tensor, or that does more with the result than to add it, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.internals.functions import with_children
from shardwise.model.override import surround_forward

# As families call them. A layer `..._gate` weighs what a token gets of them.
_NAMES = ("shared_experts", "shared_expert", "shared_mlp")
_GATE = "{}_gate"
_APART = True


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """The shared experts of one block, which the block itself does not compute any more."""

    mlp: nn.Module
    gate: nn.Module | None

    def __call__(self, x: Tensor) -> Tensor:
        """What they make of each token."""
        made: Tensor = self.mlp(x, _APART)
        return made if self.gate is None else torch.sigmoid(self.gate(x, _APART)) * made


def take_apart(model: nn.Module, experts: list[nn.Module]) -> dict[nn.Module, SharedExperts]:
    """The shared experts beside each of these modules of experts. From now on the blocks take them
    for zero. The model may be on meta."""
    if not experts:
        return {}
    hidden = _hidden_size(model)
    found = {}
    for mixture in list(model.modules()):
        own = [each for each in mixture.children() if each in experts]
        shared = _find(mixture, own[0], hidden) if len(own) == 1 else None
        if shared is not None:
            found[own[0]] = shared
    parts = [part for each in found.values() for part in (each.mlp, each.gate) if part is not None]
    surround_forward(parts, "Apart", _zero_but_apart)
    return found


def _zero_but_apart(forward: Callable[..., Any]) -> Callable[..., Any]:
    # The compiler would look for the default of an argument in a function of its own.
    def standing(self: nn.Module, x: Tensor, *apart: bool) -> Tensor:
        # A number in the place of all of its rows: it is added, or multiplied and added.
        return forward(self, x) if apart else x.new_zeros(())

    return standing


def _hidden_size(model: Any) -> int:
    size: int = model.config.get_text_config().hidden_size
    return size


def _find(mixture: nn.Module, experts: nn.Module, hidden: int) -> SharedExperts | None:
    children = dict(mixture.named_children())
    name = next((name for name in _NAMES if name in children), None)
    if name is None:
        return None
    shared = SharedExperts(children[name], children.get(_GATE.format(name)))
    return shared if _only_adds(mixture, shared, experts, hidden) else None


def _only_adds(mixture: nn.Module, shared: SharedExperts, experts: nn.Module, hidden: int) -> bool:
    """Whether a block makes the same of a few tokens where the shared experts are taken apart.
    Experts of both kinds are functions that tell tensors from each other."""
    children = dict(mixture.named_children())
    whole = {
        name: _on_cpu(child)
        for name, child in children.items()
        if child not in (experts, shared.mlp)
    }
    gate = whole.get(next((n for n, each in children.items() if each is shared.gate), ""))

    def both(x: Tensor) -> Tensor:
        made = torch.cos(2 * x)
        return torch.sin(x) + (made if gate is None else torch.sigmoid(gate(x)) * made)

    def run(stands: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> tuple[Any, list[int]]:
        given = {n: _Stub(stands[child]) for n, child in children.items() if child in stands}
        x = torch.linspace(-2, 2, 6 * hidden).view(2, 3, hidden)
        out = with_children(mixture, {**whole, **given})(x)
        return out, [stub.num_calls for stub in given.values()]

    def zero(x: Tensor) -> Tensor:
        return x.new_zeros(())

    apart = {experts: both, shared.mlp: zero}
    if shared.gate is not None:
        apart[shared.gate] = zero
    try:
        with torch.no_grad():
            expected, calls = run({experts: torch.sin, shared.mlp: lambda x: torch.cos(2 * x)})
            found, _ = run(apart)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    is_tensor = isinstance(expected, Tensor) and isinstance(found, Tensor) and found.is_cpu
    if not is_tensor or calls != [1, 1] or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def _on_cpu(module: nn.Module) -> nn.Module:
    """The same with made numbers in fp32."""
    made = deepcopy(module).to_empty(device="cpu").float()
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in (*made.parameters(), *made.buffers()):
            if each.is_floating_point():
                each.normal_(generator=numbers)
    return made


class _Stub(nn.Module):
    """A function of the first argument in a module's place."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function, self.num_calls = function, 0

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """What it makes of the first argument."""
        self.num_calls += 1
        return self._function(x)
