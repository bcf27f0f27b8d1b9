"""Gated MLPs as in Llama, Gemma and Phi: which modules they are, and a backward that saves less.

Autograd saves the product of the two halves for the gradient of the last layer. The compiler saves
it too, because a matmul reads it. The product can be recomputed from the halves, which are saved
anyway, in the kernel that has to read both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.internals.functions import with_children
from shardwise.kernels.swiglu import ACTIVATIONS, gated, gated_backward, up_and_product
from shardwise.model.override import override_forward

PARTS = ("gate_proj", "up_proj", "down_proj")
# Both halves in one layer.
_JOINED = ("gate_up_proj", "down_proj")
# Sizes of the small layers that a module is tried with.
_SMALL: dict[tuple[str, ...], Mapping[str, tuple[int, int]]] = {
    PARTS: dict(zip(PARTS, ((8, 16), (8, 16), (16, 8)), strict=True)),
    _JOINED: dict(zip(_JOINED, ((8, 32), (16, 8)), strict=True)),
}


def apply_gated_mlp(blocks: list[nn.Module]) -> None:
    """Let the gated MLPs of blocks save less, where they consist of plain layers."""
    modules = [module for block in blocks for module in block.modules()]
    found = {module: activation_of(module) for module in modules if _has_plain_parts(module)}
    for activation in ACTIVATIONS:
        _override([module for module, its in found.items() if its == activation], activation)


def _override(mlps: list[nn.Module], activation: str) -> None:
    override_forward(mlps, "Gated", lambda cls: gated_forward(GatedMLP, activation))


def activation_of(mlp: nn.Module) -> str | None:
    """The activation of a gated MLP. The module's own code runs over small layers, because some
    families scale or clip in between."""
    parts = PARTS if hasattr(mlp, PARTS[0]) else _JOINED
    with torch.random.fork_rng(devices=[]):
        layers = {part: nn.Linear(*size, bias=False) for part, size in _SMALL[parts].items()}
    small = with_children(mlp, layers)
    x = torch.linspace(-2, 2, 32).view(4, 8)
    try:
        found = small(x)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    if not isinstance(found, Tensor) or not found.is_cpu:
        return None
    gate, up, down = _weights(small)
    for activation in ACTIVATIONS:
        expected = gated(x @ gate.t(), x @ up.t(), activation) @ down.t()
        if torch.allclose(found, expected, atol=1e-6):
            return activation
    return None


def _has_plain_parts(module: nn.Module) -> bool:
    """Whether it has the layers, and they are plain ones; LoRA's, for example, are not."""
    return any(
        all(type(part) is nn.Linear and part.bias is None for part in parts)
        for parts in ([getattr(module, name, None) for name in names] for names in _SMALL)
    )


def _weights(mlp: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of gate, up and down."""
    if hasattr(mlp, PARTS[0]):
        return mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    return gate, up, mlp.down_proj.weight


def gated_forward(
    function: type[torch.autograd.Function], *settings: str
) -> Callable[[Any, Tensor], Tensor]:
    """The forward of a gated MLP as a function of its input and its three weights."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = function.apply(x, *_weights(self), *settings)
        return y

    return forward


@torch.compiler.allow_in_graph
class GatedMLP(torch.autograd.Function):
    """(activation(x @ gate.T) * (x @ up.T)) @ down.T"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str
    ) -> Tensor:
        """The product of the two halves is not saved, because backward recomputes it."""
        rows = x.reshape(-1, x.shape[-1])
        g = rows @ gate.t()
        u, product = up_and_product(rows, up, g, activation)
        ctx.activation = activation
        ctx.save_for_backward(rows, g, u, gate, up, down)
        return (product @ down.t()).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input, and of the weights that need one."""
        rows, g, u, gate, up, down = ctx.saved_tensors
        grad = grads[0].reshape(-1, down.shape[0])
        g_grad, u_grad, product = gated_backward(grad, down, g, u, ctx.activation)
        _, gate_learns, up_learns, down_learns, _ = ctx.needs_input_grad
        return (
            (g_grad @ gate + u_grad @ up).reshape(*grads[0].shape[:-1], -1),
            g_grad.t() @ rows if gate_learns else None,
            u_grad.t() @ rows if up_learns else None,
            grad.t() @ product if down_learns else None,
            None,
        )
