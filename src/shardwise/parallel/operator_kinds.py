"""What an operator is to a forecast: a matmul, an attention, a pass over memory, or nothing."""

from __future__ import annotations

import operator
from typing import Any

import torch

# This defines the operators of ours that are named below.
from shardwise.parallel.remat import MATMULS

_ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "causal_attention",
    "causal_attention_grad",
    "last_tokens_attention",
    "last_tokens_attention_grad",
)
# SwiGLU in a matmul's epilogue, forward and backward.
EPILOGUES = ("up_and_product", "gated_backward")
# Their results are made where they are needed.
_CREATED = (
    *("full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "empty", "empty_like"),
    *("arange", "iota", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("empty_strided", "new_empty_strided", "empty_permuted", "lift_fresh_copy"),
)
GATHERS = ("index", "gather", "embedding", "index_select")
# The compiler fuses these with what is around them, as it does all that is element-wise.
_MOVES = (
    *GATHERS,
    *("cat", "stack", "constant_pad_nd", "clone", "copy", "_to_copy", "flip", "repeat", "roll"),
    *("select_scatter", "slice_scatter", "diagonal_scatter", "slice_backward", "select_backward"),
    *("convert_element_type", "where", "tril", "triu", "masked_fill"),
)
REDUCTIONS = (
    *("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod"),
    *("var", "var_mean", "std", "logsumexp", "linalg_vector_norm"),
    *("_softmax", "_log_softmax", "native_layer_norm"),
)
_VIEWS = ("_unsafe_view", "reshape", "detach", "alias", "lift_fresh")


def name_of(target: Any) -> str:
    """An operator's name without its overload and its library, such as `mm`."""
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(target, "__name__", "")


def is_matmul(target: Any) -> bool:
    """Whether this multiplies matrices; those of experts too, whoever has defined it."""
    return target in MATMULS or "grouped_mm" in name_of(target)


def is_heavy(target: Any) -> bool:
    """Whether its time is that of matmuls or attention, not of memory."""
    name = name_of(target)
    return is_matmul(target) or name in _ATTENTIONS or name in EPILOGUES


def is_view(target: Any) -> bool:
    """Whether it moves nothing."""
    if target is operator.getitem:
        return False
    return bool(getattr(target, "is_view", False)) or name_of(target) in _VIEWS


def is_created(target: Any) -> bool:
    """Whether its result depends on no data."""
    return name_of(target) in _CREATED


def is_fused(target: Any) -> bool:
    """Whether the compiler fuses it with its neighbours."""
    name = name_of(target)
    is_pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return is_pointwise or name in _MOVES or name in REDUCTIONS
