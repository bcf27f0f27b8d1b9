"""The operators of `swiglu.py` as epilogues of quack-kernels' matmuls.

An epilogue runs for each number of the result while it is in a register.
"""

from __future__ import annotations

import cutlass.cute as cute
from quack.epilogue import gemm_epilogue
from quack.gemm_config import GemmConfig
from torch import Tensor

from shardwise.kernels.swiglu import ACTIVATIONS

_LOG2_E = 1.4426950408889634
# Of gelu in its form with tanh.
_LINEAR, _CUBIC = ACTIVATIONS["gelu_tanh"]
# The fastest of six tiles for Llama 3.1 8B's MLP on an H200. While one half of a multiprocessor is
# in its epilogue, the other half multiplies.
_TILE = GemmConfig(tile_m=128, tile_n=192, pingpong=True, is_dynamic_persistent=False)


def up_and_product(
    x: Tensor, weight: Tensor, gate: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    multiply = {"silu": _with_product, "gelu_tanh": _with_gelu_product}[activation]
    made = multiply(x, weight.t(), gate, config=_TILE, tuned=False)
    return made["D"], made["product"]


def gated_backward(
    grad: Tensor, weight: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    multiply = {"silu": _with_grads, "gelu_tanh": _with_gelu_grads}[activation]
    made = multiply(grad, weight, gate, up=up, config=_TILE, tuned=False)
    return made["D"], made["up_grad"], made["product"]


def _sigmoid(x):
    # rsqrt is one instruction, and a division is ten.
    root = cute.math.rsqrt(1.0 + cute.math.exp2(-_LOG2_E * x, fastmath=True), fastmath=True)
    return root * root


# `acc`, `c` and "D" are quack's names for the matmul's result, for the gate, and for the output
# that replaces the result. quack fingerprints the functions that an epilogue calls, so these call
# none of its own.


@gemm_epilogue(outputs=("product",))
def _with_product(acc, c):
    return {"D": acc, "product": c * _sigmoid(c) * acc}


@gemm_epilogue(outputs=("up_grad", "product"))
def _with_grads(acc, c, up):
    s = _sigmoid(c)
    silu = c * s
    return {"D": acc * up * (s + silu - silu * s), "up_grad": acc * silu, "product": silu * up}


@gemm_epilogue(outputs=("product",))
def _with_gelu_product(acc, c):
    return {"D": acc, "product": c * _sigmoid(c * (_LINEAR + _CUBIC * c * c)) * acc}


@gemm_epilogue(outputs=("up_grad", "product"))
def _with_gelu_grads(acc, c, up):
    s = _sigmoid(c * (_LINEAR + _CUBIC * c * c))
    gelu = c * s
    steep = gelu * (_LINEAR + 3.0 * _CUBIC * c * c)
    return {"D": acc * up * (s + steep - steep * s), "up_grad": acc * gelu, "product": gelu * up}
