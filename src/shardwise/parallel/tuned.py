"""Linear layers of blocks by tuned matmuls: the same modules, names, weights and numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kernels.cublaslt import Problem
from shardwise.kernels.matmul import Tuned, matmul, tune, why_not_tuned
from shardwise.model.override import override_forward
from shardwise.parallel.precision import DTYPES
from shardwise.plan.plan import Plan


@torch.compiler.allow_in_graph
class Linear(torch.autograd.Function):
    """x @ weight.T, its three matmuls by three algorithms."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ahead: str, to_input: str, to_weight: str
    ) -> Tensor:
        """Keeps what F.linear keeps."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        ctx.algorithms = (to_input, to_weight)
        return matmul(rows, weight.t(), ahead).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of the input and of the weight, where they are wanted."""
        x, weight = ctx.saved_tensors
        to_input, to_weight = ctx.algorithms
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        x_grad = w_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = matmul(rows, weight, to_input).view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            w_grad = matmul(rows.t(), x, to_weight)
        return x_grad, w_grad, None, None, None


def apply_tuned(blocks: list[nn.Module], plan: Plan) -> None:
    """Try algorithms for every size of layer, and let the layers take what was found."""
    if plan.matmul.value != "tuned" or plan.cluster.device != "cuda" or why_not_tuned():
        return
    take_tuned(blocks, plan)
    torch.cuda.empty_cache()


def take_tuned(blocks: list[nn.Module], plan: Plan) -> None:
    """Layers that something else has changed already, as float8 does, stay as they are."""
    modules = (module for block in blocks for module in block.modules())
    layers: list[Any] = [module for module in modules if type(module) is nn.Linear]
    for layer in layers:
        found = _tune_layer(layer.in_features, layer.out_features, plan)
        layer.tuned = (_tokens(plan), *(one.algorithm for one in found))
    override_forward(layers, "Tuned", lambda cls: _forward)


def tuned_note(model: nn.Module, plan: Plan) -> str | None:
    """How many layers were tuned and what that gains, or why none was though it was planned."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "tuned")]
    if not layers:
        planned = plan.matmul.value == "tuned" and plan.cluster.device == "cuda"
        return f"no matmul is tuned: {why_not_tuned() or 'no layer is plain'}" if planned else None
    took = before = 0.0
    for layer in layers:
        for one in _tune_layer(layer.in_features, layer.out_features, plan):
            took, before = took + one.seconds, before + one.torch_s
    return (
        f"matmuls of {len(layers)} linear layers are tuned: {1e3 * took:,.0f} ms for "
        f"{_tokens(plan):,} tokens instead of {1e3 * before:,.0f}"
    )


def _tune_layer(wide_in: int, wide_out: int, plan: Plan) -> tuple[Tuned, Tuned, Tuned]:
    """Forward, then backward to the input and to the weight. Layers of one size are tried once."""
    tokens, dtype = _tokens(plan), DTYPES[plan.param_dtype.value]
    return (
        tune(Problem(tokens, wide_in, wide_out, False, True, dtype)),
        tune(Problem(tokens, wide_out, wide_in, False, False, dtype)),
        tune(Problem(wide_out, tokens, wide_in, True, False, dtype)),
    )


def _tokens(plan: Plan) -> int:
    """Of a micro-batch."""
    return plan.micro_batch.value * plan.config.data.seq_len


def _forward(self: Any, x: Tensor) -> Tensor:
    """Another number of tokens than was tuned for is left to torch."""
    tokens, *algorithms = self.tuned
    if x.numel() != tokens * self.in_features:
        return F.linear(x, self.weight, self.bias)
    y: Tensor = Linear.apply(x, self.weight, *algorithms)
    return y if self.bias is None else y + self.bias.to(y.dtype)
