"""SwiGLU or GeGLU and the matmul beside it as operators, forward and backward.

On a GPU they are computed in the matmul's epilogue, or in Triton after it. On a CPU they are plain
torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import custom_op

from shardwise.kernels.hopper import has_quack, on_hopper

# Both activations are x * sigmoid(linear * x + cubic * x^3): silu, and gelu in its form with tanh.
_TANH = 2 * math.sqrt(2 / math.pi)
ACTIVATIONS = {"silu": (1.0, 0.0), "gelu_tanh": (_TANH, 0.044715 * _TANH)}
# For an epilogue, tensors and their rows must be aligned to this many bytes.
_ALIGNED = 16


@custom_op("shardwise::up_and_product", mutates_args=(), device_types="cpu")
def up_and_product(
    x: Tensor, weight: Tensor, gate: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """up = x @ weight.T, and activation(gate) * up."""
    up = x @ weight.t()
    return up, gated(gate, up, activation).to(up.dtype)


@custom_op("shardwise::gated_backward", mutates_args=(), device_types="cpu")
def gated_backward(
    grad: Tensor, weight: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and of up, and activation(gate) * up.

    `grad @ weight` is the gradient of that product. Backward recomputes the product, so forward
    need not keep it.
    """
    gate_grad, up_grad = gated_grads(gate, up, grad @ weight, activation)
    product = gated(gate, up, activation)
    return gate_grad.to(up.dtype), up_grad.to(up.dtype), product.to(up.dtype)


@up_and_product.register_fake
def _(x: Tensor, weight: Tensor, gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(gate)


@gated_backward.register_fake
def _(
    grad: Tensor, weight: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up), torch.empty_like(up)


# These modules import packages that are missing where there is no GPU.


@up_and_product.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if _fits_inside(x, weight, gate):
        from shardwise.kernels import swiglu_quack

        return swiglu_quack.up_and_product(x, weight, gate, activation)
    from shardwise.kernels import swiglu_triton

    up = x @ weight.t()
    return up, swiglu_triton.product(gate, up, *ACTIVATIONS[activation])


@gated_backward.register_kernel("cuda")
def _(
    grad: Tensor, weight: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    if _fits_inside(grad, weight, gate, up):
        from shardwise.kernels import swiglu_quack

        return swiglu_quack.gated_backward(grad, weight, gate, up, activation)
    from shardwise.kernels import swiglu_triton

    product_grad = grad @ weight
    made = swiglu_triton.gated_backward(gate, up, product_grad, *ACTIVATIONS[activation])
    return product_grad, *made


def _fits_inside(*tensors: Tensor) -> bool:
    """Whether an epilogue can compute it."""
    return has_quack() and on_hopper() and all(map(_is_even, tensors))


def _is_even(tensor: Tensor) -> bool:
    row = tensor.shape[-1] * tensor.element_size()
    starts_even = tensor.data_ptr() % _ALIGNED == 0 and row % _ALIGNED == 0
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and starts_even


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in fp32."""
    return gated(gate, up, "silu")


def swiglu_grads(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and of up, in fp32."""
    return gated_grads(gate, up, grad, "silu")


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, in fp32."""
    gate = gate.float()
    return gate * _inside(gate, activation)[0].sigmoid() * up.float()


def gated_grads(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradients of gate and of up, in fp32."""
    gate, up, grad = gate.float(), up.float(), grad.float()
    inside, slope = _inside(gate, activation)
    sigmoid = inside.sigmoid()
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid) * slope), grad * gate * sigmoid


def _inside(gate: Tensor, activation: str) -> tuple[Tensor, Tensor | float]:
    """What the sigmoid is taken of, and its derivative."""
    linear, cubic = ACTIVATIONS[activation]
    if not cubic:
        return linear * gate, linear
    return gate * (linear + cubic * gate**2), linear + 3 * cubic * gate**2
