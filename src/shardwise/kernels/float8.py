"""Casts to float8 as operators: in Triton on a GPU, in plain torch on a CPU.

A GPU multiplies float8 only where both factors are contiguous along the dimension of the sum, so
backward needs every factor transposed. The compiler reads the bf16 numbers once for each copy that
it writes, and writes a copy for each layer that reads it. These operators write both copies of a
tensor in one pass, and layers that share an input share its copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op, register_fake

from shardwise.kernels.operators import on_gpu, operator
from shardwise.kernels.swiglu import swiglu, swiglu_grads

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Activations and weights need digits, gradients need range."""

_LEAST = 1e-12  # the largest number of a tensor that is all zeros, so that nothing divides by zero


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that lets a tensor whose largest magnitude is `amax` fill the format."""
    return (torch.finfo(dtype).max / amax.double().clamp(min=_LEAST)).float()


@operator("amax")
def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude of a matrix.

    This is for a matrix that no compiled kernel has just written: the compiler's own kernel for it
    runs at a quarter of the memory's bandwidth.
    """
    return x.abs().amax().float()


@operator("float8_cast")
def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix in float8."""
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype)


@custom_op("shardwise::float8_cast_both", mutates_args=(), device_types="cpu")
def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in float8, and its transpose in float8."""
    rows = cast(x, scale, dtype)
    return rows, rows.t().contiguous()


@custom_op("shardwise::float8_transposed", mutates_args=(), device_types="cpu")
def transposed(x: Tensor, after: Tensor) -> Tensor:
    """The transpose of a float8 matrix.

    `after` is not read. It is a gradient that ties this operator to backward: the compiler would
    compute what depends on no gradient in forward, and keep it.
    """
    return x.t().contiguous()


@custom_op("shardwise::swiglu_amax", mutates_args=(), device_types="cpu")
def swiglu_amax(gate: Tensor, up: Tensor) -> Tensor:
    """The largest magnitude of silu(gate) * up."""
    return swiglu(gate, up).abs().amax()


@custom_op("shardwise::swiglu_cast", mutates_args=(), device_types="cpu")
def swiglu_cast(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """silu(gate) * up in float8."""
    return cast(swiglu(gate, up), scale, FORWARD)


@custom_op("shardwise::swiglu_grad_amax", mutates_args=(), device_types="cpu")
def swiglu_grad_amax(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    """The largest magnitudes of the gradients of gate and of up."""
    return torch.stack([each.abs().amax() for each in swiglu_grads(gate, up, grad)])


@custom_op("shardwise::swiglu_grad_cast", mutates_args=(), device_types="cpu")
def swiglu_grad_cast(
    gate: Tensor, up: Tensor, grad: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Five matrices in float8: the gradient of gate, its transpose, the gradient of up, its
    transpose, and the transpose of silu(gate) * up.

    `scales` are those of the two gradients and of the product.
    """
    gate_grad, up_grad = swiglu_grads(gate, up, grad)
    rows_of_gate, columns_of_gate = cast_both(gate_grad, scales[0], BACKWARD)
    rows_of_up, columns_of_up = cast_both(up_grad, scales[1], BACKWARD)
    product = cast(swiglu(gate, up), scales[2], FORWARD).t().contiguous()
    return rows_of_gate, columns_of_gate, rows_of_up, columns_of_up, product


# ---- what the compiler must know ------------------------------------------------------------


def _turned(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], dtype=dtype)


@register_fake(amax_of)
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@register_fake(cast)
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@cast_both.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), _turned(x, dtype)


@transposed.register_fake
def _(x: Tensor, after: Tensor) -> Tensor:
    return _turned(x, x.dtype)


@swiglu_amax.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty((), dtype=torch.float32)


@swiglu_cast.register_fake
def _(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(gate, dtype=FORWARD)


@swiglu_grad_amax.register_fake
def _(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    return gate.new_empty(2, dtype=torch.float32)


@swiglu_grad_cast.register_fake
def _(
    gate: Tensor, up: Tensor, grad: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = torch.empty_like(gate, dtype=BACKWARD)
    columns = _turned(gate, BACKWARD)
    return (
        rows,
        columns,
        torch.empty_like(rows),
        torch.empty_like(columns),
        _turned(gate, FORWARD),
    )


# ---- on a GPU ---------------------------------------------------------------------------------


def _by_triton(made: Any, name: str) -> None:
    """The Triton kernel of this name, imported when a GPU needs it."""

    def kernel(*given: Any) -> Any:
        from shardwise.kernels import float8_triton

        return getattr(float8_triton, name)(*given)

    if isinstance(made, CustomOpDef):
        made.register_kernel("cuda")(kernel)
    else:
        on_gpu(made)(kernel)


_by_triton(amax_of, "amax_of")
_by_triton(cast, "cast")
_by_triton(cast_both, "cast_both")
_by_triton(transposed, "transposed")
_by_triton(swiglu_amax, "swiglu_amax")
_by_triton(swiglu_cast, "swiglu_cast")
_by_triton(swiglu_grad_amax, "swiglu_grad_amax")
_by_triton(swiglu_grad_cast, "swiglu_grad_cast")
