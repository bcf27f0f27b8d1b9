"""Gated MLPs as in Llama: which modules they are, and a backward that saves less.

Autograd saves the product of the two halves for the gradient of the last layer. The compiler saves
it too, because a matmul reads it. The product can be recomputed from the halves, which are saved
anyway, in the kernel that has to read both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.internals.functions import with_children
from shardwise.kernels.swiglu import swiglu_backward, up_and_product
from shardwise.model.override import override_forward

PARTS = ("gate_proj", "up_proj", "down_proj")
# Sizes of the small layers that a module is tried with.
_SMALL = dict(zip(PARTS, ((8, 16), (8, 16), (16, 8)), strict=True))


def apply_gated_mlp(blocks: list[nn.Module]) -> None:
    """Let the gated MLPs of blocks save less, where they consist of plain layers."""
    modules = [module for block in blocks for module in block.modules()]
    gated = [module for module in modules if _has_plain_parts(module) and is_swiglu(module)]
    override_forward(gated, "Gated", lambda cls: gated_forward(GatedMLP))


def is_swiglu(mlp: nn.Module) -> bool:
    """Whether this is SwiGLU. The module's own code runs over small layers, because some
    families scale or clip in between."""
    with torch.random.fork_rng(devices=[]):
        layers = {part: nn.Linear(*size, bias=False) for part, size in _SMALL.items()}
    small = with_children(mlp, layers)
    x = torch.linspace(-2, 2, 32).view(4, 8)
    gate, up, down = (layer.weight for layer in layers.values())
    expected = (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    try:
        found = small(x)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return isinstance(found, Tensor) and found.is_cpu and torch.allclose(found, expected, atol=1e-6)


def _has_plain_parts(module: nn.Module) -> bool:
    """Whether the layers are plain ones; LoRA's, for example, are not."""
    parts = [getattr(module, part, None) for part in PARTS]
    return all(type(part) is nn.Linear and part.bias is None for part in parts)


def gated_forward(function: type[torch.autograd.Function]) -> Callable[[Any, Tensor], Tensor]:
    """The forward of a gated MLP as a function of its input and its three weights."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        y: Tensor = function.apply(x, *weights)
        return y

    return forward


@torch.compiler.allow_in_graph
class GatedMLP(torch.autograd.Function):
    """(silu(x @ gate.T) * (x @ up.T)) @ down.T"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """The product of the two halves is not saved, because backward recomputes it."""
        rows = x.reshape(-1, x.shape[-1])
        g = rows @ gate.t()
        u, product = up_and_product(rows, up, g)
        ctx.save_for_backward(rows, g, u, gate, up, down)
        return (product @ down.t()).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input, and of the weights that need one."""
        rows, g, u, gate, up, down = ctx.saved_tensors
        grad = grads[0].reshape(-1, down.shape[0])
        g_grad, u_grad, product = swiglu_backward(grad, down, g, u)
        _, gate_learns, up_learns, down_learns = ctx.needs_input_grad
        return (
            (g_grad @ gate + u_grad @ up).reshape(*grads[0].shape[:-1], -1),
            g_grad.t() @ rows if gate_learns else None,
            u_grad.t() @ rows if up_learns else None,
            grad.t() @ product if down_learns else None,
        )
