"""What the experts of a module compute, found out by running the module's own code over small
weights: families add biases or norms, clip, or order the halves otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from shardwise.internals.functions import with_parameters
from shardwise.kernels.clamped_swiglu import clamped_swiglu

STACKS = ("gate_up_proj", "down_proj")
BIAS = "{}_bias"
BIASES = tuple(map(BIAS.format, STACKS))
# Sizes of the small experts that a module is tried with: experts, hidden channels, width.
_EXPERTS, _HIDDEN, _WIDTH = 3, 8, 16


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """Two matmuls, and what lies between them."""

    activate: Callable[[Any, Tensor], Tensor]
    """What becomes of rows of gate and up, by a module's own numbers."""

    is_biased: bool
    is_transposed: bool
    """Whether weights lie as (experts, in, out), and not as (experts, out, in)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that such a module has."""
        return (*STACKS, *BIASES) if self.is_biased else STACKS


def _swiglu(experts: Any, halves: Tensor) -> Tensor:
    gate, up = halves.chunk(2, dim=-1)
    return silu(gate) * up


def _clamped_swiglu(experts: Any, pairs: Tensor) -> Tensor:
    return clamped_swiglu(pairs, experts.alpha, experts.limit)


SWIGLU = ExpertForm(_swiglu, is_biased=False, is_transposed=False)
CLAMPED_SWIGLU = ExpertForm(_clamped_swiglu, is_biased=True, is_transposed=True)


def find_form(experts: nn.Module) -> ExpertForm | None:
    """The form of these experts; None where it is neither, or where this is another module."""
    own = dict(experts.named_parameters(recurse=False))
    if not all(name in own and own[name].ndim == 3 for name in STACKS):
        return None
    forms = (form for form in (SWIGLU, CLAMPED_SWIGLU) if set(own) == set(form.names))
    return next((form for form in forms if _has(experts, form)), None)


def _has(experts: nn.Module, form: ExpertForm) -> bool:
    """Whether the experts compute what the form says, weighted and summed."""
    count = getattr(experts, "num_experts", None)
    if not isinstance(count, int):
        return False
    stacks, biases = _small_weights(count, getattr(experts, "limit", 1.0))
    lying = [stack.mT.contiguous() if form.is_transposed else stack for stack in stacks]
    values = dict(zip(form.names, (*lying, *biases), strict=False))
    x = torch.linspace(-2, 2, 5 * _HIDDEN).view(5, _HIDDEN)
    chosen = torch.arange(10).view(5, 2) % min(count, _EXPERTS)
    weights = torch.linspace(0.1, 1, 10).view(5, 2)
    try:
        found = with_parameters(experts, values)(x, chosen, weights)
        expected = _one_by_one(experts, form, (x, chosen, weights), stacks, biases)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    is_tensor = isinstance(found, Tensor) and found.is_cpu
    return is_tensor and torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def _small_weights(count: int, limit: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Weights as (experts, out, in), and biases, which are so large that a limit is passed."""
    numbers = torch.Generator().manual_seed(0)
    shapes = ((count, 2 * _WIDTH, _HIDDEN), (count, _HIDDEN, _WIDTH))
    stacks = [torch.randn(shape, generator=numbers) for shape in shapes]
    scale = limit if isinstance(limit, int | float) else 1.0
    return stacks, [scale * torch.randn(shape[:2], generator=numbers) for shape in shapes]


def _one_by_one(
    experts: nn.Module,
    form: ExpertForm,
    given: tuple[Tensor, Tensor, Tensor],
    stacks: list[Tensor],
    biases: list[Tensor],
) -> Tensor:
    gate_up, down = stacks
    added, added_last = biases if form.is_biased else map(torch.zeros_like, biases)
    rows = []
    for row, chosen, shares in zip(given[0], given[1].tolist(), given[2], strict=True):
        made = [form.activate(experts, gate_up[e] @ row + added[e]) for e in chosen]
        last = [down[e] @ each + added_last[e] for e, each in zip(chosen, made, strict=True)]
        rows.append((shares[:, None] * torch.stack(last)).sum(0))
    return torch.stack(rows)
