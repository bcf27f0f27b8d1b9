"""Experts with SwiGLU: which modules they are, and a pass over them that saves a quarter.

transformers sorts rows by expert and multiplies them in groups. Autograd then saves what goes into
and comes out of each matmul, once for each expert of a token. Ours saves the two halves of SwiGLU.
What goes in is dealt out again in backward, and the weights of a token's experts are applied where
rows are narrow, so that what comes out is needed for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from shardwise.internals.functions import with_parameters
from shardwise.kernels.experts import (
    deal_rows,
    sum_rows,
    weighted_swiglu,
    weighted_swiglu_backward,
)
from shardwise.model.override import override_forward

STACKS = ("gate_up_proj", "down_proj")
# Sizes of the small experts that a module is tried with: experts, hidden channels, width.
_EXPERTS, _HIDDEN, _WIDTH = 3, 8, 16


def apply_experts(blocks: list[nn.Module]) -> None:
    """Let the experts of blocks save less, where they are SwiGLU without biases."""
    modules = [module for block in blocks for module in block.modules()]
    plain = [module for module in modules if _has_stacks(module) and is_plain(module)]
    override_forward(plain, "Grouped", lambda cls: _forward)


def is_plain(experts: nn.Module) -> bool:
    """Whether these experts are SwiGLU, weighted and summed. The module's own code runs over small
    weights, because some families add biases or norms, clip, or order the halves otherwise."""
    count = getattr(experts, "num_experts", None)
    if not isinstance(count, int):
        return False
    numbers = torch.Generator().manual_seed(0)
    shapes = ((count, 2 * _WIDTH, _HIDDEN), (count, _HIDDEN, _WIDTH))
    stacks = [torch.randn(shape, generator=numbers) for shape in shapes]
    small = with_parameters(experts, dict(zip(STACKS, stacks, strict=True)))
    x = torch.linspace(-2, 2, 5 * _HIDDEN).view(5, _HIDDEN)
    chosen = torch.arange(10).view(5, 2) % min(count, _EXPERTS)
    weights = torch.linspace(0.1, 1, 10).view(5, 2)
    try:
        found = small(x, chosen, weights)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    expected = _one_by_one(x, chosen, weights, *stacks)
    return isinstance(found, Tensor) and found.is_cpu and torch.allclose(found, expected, atol=1e-4)


def _one_by_one(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    rows = []
    for row, experts, shares in zip(x, chosen.tolist(), weights, strict=True):
        halves = [(gate_up[expert] @ row).chunk(2) for expert in experts]
        made = [down[e] @ (silu(g) * u) for e, (g, u) in zip(experts, halves, strict=True)]
        rows.append((shares[:, None] * torch.stack(made)).sum(0))
    return torch.stack(rows)


def _has_stacks(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return set(own) == set(STACKS) and all(stack.ndim == 3 for stack in own.values())


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    return Experts.apply(
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj
    )


@torch.compiler.allow_in_graph
class Experts(torch.autograd.Function):
    """For each token, the weighted sum of what its experts make of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """Only the halves of SwiGLU are saved of what is there once for each expert of a token."""
        order, places, ends = _sort_by_expert(chosen, len(gate_up))
        tokens, shares = order // chosen.shape[1], weights.reshape(-1)[order]
        # Backward deals the rows out by an operator. If both did, the compiler would save them.
        halves = grouped_mm(x[tokens], gate_up.mT, offs=ends)
        made = weighted_swiglu(halves, shares)
        ctx.save_for_backward(x, halves, tokens, shares, places, ends, gate_up, down)
        return sum_rows(grouped_mm(made, down.mT, offs=ends), places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of tokens and weights, and of the experts that learn."""
        x, halves, tokens, shares, places, ends, gate_up, down = ctx.saved_tensors
        grad = grads[0][tokens]
        d_made = grouped_mm(grad, down, offs=ends)
        d_halves, made, d_shares = weighted_swiglu_backward(d_made, halves, shares)
        *_, gate_up_learns, down_learns = ctx.needs_input_grad
        rows = deal_rows(x, tokens) if gate_up_learns else None
        return (
            sum_rows(grouped_mm(d_halves, gate_up, offs=ends), places),
            None,
            d_shares[places],
            None if rows is None else grouped_mm(d_halves.t(), rows, offs=ends),
            grouped_mm(grad.t(), made, offs=ends) if down_learns else None,
        )


def _sort_by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the order of rows by expert, where each of a token's rows is then, where experts end)."""
    # A GPU sorts bytes in one pass, and int64 in eight.
    narrow = torch.uint8 if count <= 256 else torch.int16
    by_expert, order = chosen.reshape(-1).to(narrow).sort(stable=True)
    row = torch.arange(len(order), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, row).view(chosen.shape)
    experts = torch.arange(count, device=order.device, dtype=torch.int32)
    ends = torch.searchsorted(by_expert.int(), experts, right=True, out_int32=True)
    return order, places, ends
