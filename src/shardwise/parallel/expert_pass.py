"""A pass over experts with SwiGLU, plain or clamped, that saves a quarter.

transformers sorts rows by expert and multiplies them in groups. Autograd then saves what goes into
and comes out of each matmul, once for each expert of a token. Ours saves gate and up. What goes in
is dealt out again in backward, and the weights of a token's experts are applied where rows are
narrow, so that what comes out is needed for nothing.

With `precision.experts=float8` the same passes multiply in eight bits (`grouped_products.py`), and
save the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels.clamped_swiglu import (
    weighted_clamped_swiglu,
    weighted_clamped_swiglu_backward,
)
from shardwise.kernels.experts import (
    deal_rows,
    sum_biased_rows,
    sum_by_expert,
    sum_rows,
    weighted_swiglu,
    weighted_swiglu_backward,
)
from shardwise.model.expert_forms import CLAMPED_SWIGLU, SWIGLU, find_form
from shardwise.model.expert_lora import ExpertLora
from shardwise.model.expert_rows import sort_by_expert
from shardwise.model.override import override_forward
from shardwise.parallel.grouped_products import product, row_grad, weight_grad


def apply_experts(blocks: list[nn.Module], *, float8: bool = False) -> list[nn.Module]:
    """Let the experts of blocks save less, where they have a form that is known here; returns them.
    Packed ones compute by a forward of their own."""
    modules = (module for block in blocks for module in block.modules())
    found = [(m, find_form(m)) for m in modules if not isinstance(m, ExpertLora)]
    plain = [module for module, form in found if form is SWIGLU]
    clamped = [module for module, form in found if form is CLAMPED_SWIGLU]
    name = "Float8Grouped" if float8 else "Grouped"
    override_forward(plain, name, partial(_swiglu, float8))
    override_forward(clamped, name, partial(_clamped_swiglu, float8))
    return plain + clamped


def _swiglu(float8: bool, cls: type[nn.Module]) -> Any:
    def forward(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Any:
        stacks = self.gate_up_proj, self.down_proj
        return Experts.apply(hidden_states, top_k_index, top_k_weights, *stacks, float8)

    return forward


def _clamped_swiglu(float8: bool, cls: type[nn.Module]) -> Any:
    def forward(
        self: Any, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor
    ) -> Any:
        stacks = self.gate_up_proj.mT, self.down_proj.mT
        biases = self.gate_up_proj_bias, self.down_proj_bias
        tokens = hidden_states, router_indices, routing_weights
        return Experts.apply(*tokens, *stacks, float8, *biases, self.alpha, self.limit)

    return forward


@torch.compiler.allow_in_graph
class Experts(torch.autograd.Function):
    """For each token, the weighted sum of what its experts make of it.

    Weights are (experts, out, in), as they lie in memory or as a view; `float8`: they multiply in
    eight bits. SwiGLU is plain, or it is clamped where two biases, `alpha` and `limit` follow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        float8: bool,
        *clamped: Any,
    ) -> Tensor:
        """Only gate and up are saved of what is there once for each expert of a token."""
        order, experts, places, ends = sort_by_expert(chosen, len(gate_up))
        tokens, shares = order // chosen.shape[1], weights.reshape(-1)[order]
        # Backward deals the rows out by an operator. If both did, the compiler would save them.
        both = product(x, gate_up, ends, float8=float8, tokens=tokens)
        ctx.float8 = float8
        saved = (x, both, tokens, shares, places, ends, gate_up, down)
        if not clamped:
            ctx.save_for_backward(*saved)
            made = weighted_swiglu(both, shares)
            return sum_rows(product(made, down, ends, float8=float8), places)
        bias, down_bias, *ctx.clamp = clamped
        ctx.save_for_backward(*saved, experts, bias, down_bias)
        made = weighted_clamped_swiglu(both, shares, bias, experts, *ctx.clamp)
        rows = product(made, down, ends, float8=float8)
        return sum_biased_rows(rows, places, down_bias, chosen, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of tokens and weights, and of the experts that learn."""
        x, both, tokens, shares, places, ends, gate_up, down, *clamped = ctx.saved_tensors
        gate_up_learns, down_learns, _, *biases_learn = ctx.needs_input_grad[3:]
        grad, float8 = grads[0][tokens], ctx.float8
        d_made = row_grad(grad, down, ends, float8=float8)
        d_biases: list[Tensor | None] = []
        if clamped:
            experts, bias, down_bias = clamped
            d_both, made, d_shares = weighted_clamped_swiglu_backward(
                d_made, both, shares, bias, experts, *ctx.clamp
            )
            # The last bias comes into the sum past the rows, times the token's weight.
            by_bias = (grads[0] @ down_bias.t()).gather(1, experts[places].long())
            d_weights = d_shares[places] + by_bias
            d_biases = [sum_by_expert(d_both, ends) if biases_learn[0] else None]
            d_biases += [sum_by_expert(grad, ends, shares) if biases_learn[1] else None, None, None]
        else:
            d_both, made, d_shares = weighted_swiglu_backward(d_made, both, shares)
            d_weights = d_shares[places]
        rows = deal_rows(x, tokens) if gate_up_learns else None
        return (
            sum_rows(row_grad(d_both, gate_up, ends, float8=float8), places),
            None,
            d_weights,
            None if rows is None else weight_grad(gate_up, d_both, rows, ends, float8=float8),
            weight_grad(down, grad, made, ends, float8=float8) if down_learns else None,
            None,
            *d_biases,
        )
