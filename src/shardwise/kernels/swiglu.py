"""SwiGLU's backward as one operator: in Triton on a GPU, in plain torch on a processor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("shardwise::swiglu_backward", mutates_args=("grad",), device_types="cpu")
def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the gradient of silu(gate) * up into that of gate, in place; return that of up, and the
    product, which forward then need not keep."""
    gate_grad, up_grad = swiglu_grads(gate, up, grad)
    grad.copy_(gate_grad)
    return up_grad.to(up.dtype), swiglu(gate, up).to(up.dtype)


@swiglu_backward.register_fake
def _(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(up), torch.empty_like(up)


@swiglu_backward.register_kernel("cuda")
def _(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    # Imported when a GPU needs it: elsewhere there is no Triton.
    from shardwise.kernels import swiglu_triton

    return swiglu_triton.swiglu_backward(gate, up, grad)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in fp32."""
    gate = gate.float()
    return gate * gate.sigmoid() * up.float()


def swiglu_grads(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and of up, in fp32."""
    gate, up, grad = gate.float(), up.float(), grad.float()
    sigmoid = gate.sigmoid()
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid
