"""SwiGLU and the matmul beside it as operators, forward and backward.

On a GPU SwiGLU is computed in the matmul's epilogue, or in Triton after it. On a CPU it is plain
torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from shardwise.kernels.hopper import has_quack, on_hopper

# For an epilogue, tensors and their rows must be aligned to this many bytes.
_ALIGNED = 16


@custom_op("shardwise::up_and_product", mutates_args=(), device_types="cpu")
def up_and_product(x: Tensor, weight: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """up = x @ weight.T, and silu(gate) * up."""
    up = x @ weight.t()
    return up, swiglu(gate, up).to(up.dtype)


@custom_op("shardwise::swiglu_backward", mutates_args=(), device_types="cpu")
def swiglu_backward(
    grad: Tensor, weight: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and of up, and silu(gate) * up.

    `grad @ weight` is the gradient of that product. Backward recomputes the product, so forward
    need not keep it.
    """
    gate_grad, up_grad = swiglu_grads(gate, up, grad @ weight)
    return gate_grad.to(up.dtype), up_grad.to(up.dtype), swiglu(gate, up).to(up.dtype)


@up_and_product.register_fake
def _(x: Tensor, weight: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(gate)


@swiglu_backward.register_fake
def _(grad: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up), torch.empty_like(up)


# These modules import packages that are missing where there is no GPU.


@up_and_product.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    if _fits_inside(x, weight, gate):
        from shardwise.kernels import swiglu_quack

        return swiglu_quack.up_and_product(x, weight, gate)
    from shardwise.kernels import swiglu_triton

    up = x @ weight.t()
    return up, swiglu_triton.product(gate, up)


@swiglu_backward.register_kernel("cuda")
def _(grad: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if _fits_inside(grad, weight, gate, up):
        from shardwise.kernels import swiglu_quack

        return swiglu_quack.swiglu_backward(grad, weight, gate, up)
    from shardwise.kernels import swiglu_triton

    product_grad = grad @ weight
    return product_grad, *swiglu_triton.swiglu_backward(gate, up, product_grad)


def _fits_inside(*tensors: Tensor) -> bool:
    return has_quack() and on_hopper() and all(map(_is_even, tensors))


def _is_even(tensor: Tensor) -> bool:
    row = tensor.shape[-1] * tensor.element_size()
    starts_even = tensor.data_ptr() % _ALIGNED == 0 and row % _ALIGNED == 0
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and starts_even


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in fp32."""
    gate = gate.float()
    return gate * gate.sigmoid() * up.float()


def swiglu_grads(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and of up, in fp32."""
    gate, up, grad = gate.float(), up.float(), grad.float()
    sigmoid = gate.sigmoid()
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid
