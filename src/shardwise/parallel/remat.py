"""Activation checkpointing: drop activations in forward, and recompute them in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.attention.flex_attention  # it defines an operator that is named below
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# These define operators that are named below.
import shardwise.kernels.attention
import shardwise.kernels.float8
import shardwise.kernels.float8_experts
import shardwise.kernels.float8_rows
import shardwise.kernels.grouped_matmul
import shardwise.kernels.last_tokens
import shardwise.kernels.swiglu
import shardwise.parallel.moved_rows  # noqa: F401
from shardwise.internals.parts import CHANGES, is_open
from shardwise.internals.tensor_collectives import ALL_TO_ALL
from shardwise.model.override import override_forward

_ATEN = torch.ops.aten
MATMULS = frozenset(
    op.default
    for op in (
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN.baddbmm,
        _ATEN._scaled_mm,
        _ATEN._grouped_mm,
        torch.ops.shardwise.any_grouped_mm,
    )
)
# Results that are expensive to compute and cheap to keep: matmuls, every attention, and the largest
# magnitudes that float8 scales are made of.
SAVED_OPS: frozenset[Any] = MATMULS | {torch.ops.higher_order.flex_attention}
SAVED_OPS |= frozenset(
    op.default
    for op in (
        _ATEN.max,
        _ATEN.amax,
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_cudnn_attention,
        _ATEN._scaled_dot_product_flash_attention_for_cpu,
        _ATEN._scaled_dot_product_attention_math,
        torch.ops.shardwise.causal_attention,
        torch.ops.shardwise.last_tokens_attention,
        torch.ops.shardwise.up_and_product,
        torch.ops.shardwise.amax,
        torch.ops.shardwise.float8_row_product,
        torch.ops.shardwise.float8_grouped_mm,
        torch.ops.shardwise.swiglu_amax,
        torch.ops.shardwise.sum_to_rows,
        torch.ops.shardwise.sum_parts,
    )
)
# The rows that experts have received: to send them again would take longer than to keep them.
SAVED_OPS |= {ALL_TO_ALL}

# Of these the first factor is rows of numbers to sum over, and so it is found in this argument.
_ROWS = {
    _ATEN.mm.default: 0,
    _ATEN.addmm.default: 1,
    _ATEN._grouped_mm.default: 0,
    torch.ops.shardwise.any_grouped_mm.default: 0,
}
# A sum over so few numbers is cheap where the result has many more columns. Adapters are made of
# such sums.
_FEW, _NARROW = 128, 16


def is_costly(op: Any, args: Sequence[Any]) -> bool:
    """Whether selective recompute keeps the results of an operator with these arguments."""
    if op not in SAVED_OPS:
        return False
    if (place := _ROWS.get(op)) is None:
        return True
    summed, columns = args[place].shape[-1], args[place + 1].shape[-1]
    return bool(summed > _FEW or summed * _NARROW > columns)


def apply_remat(blocks: list[nn.Module], mode: str | float) -> None:
    """`none`, `full`, `selective`, or the fraction of blocks that is recomputed."""
    if mode == "none":
        return
    if mode == "selective":
        override_forward(blocks, "Remat", partial(_recomputed, _SELECTIVE))
        return
    share = 1.0 if mode == "full" else float(mode)
    override_forward(spread(blocks, share), "Remat", partial(_recomputed, _WHOLE))


def spread(blocks: list[nn.Module], share: float) -> list[nn.Module]:
    """`share` of the blocks, evenly spaced, so that memory falls evenly along the depth."""
    count = round(share * len(blocks))
    return [blocks[(2 * index + 1) * len(blocks) // (2 * count)] for index in range(count)]


def _keep_costly(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    costly = is_costly(op, args)
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


def _eager_contexts() -> Any:
    """Contexts of ours, where torch is as we know it."""
    if not is_open(CHANGES):
        return create_selective_checkpoint_contexts(_keep_costly)
    from shardwise.parallel.kept import contexts_that_keep

    return contexts_that_keep(is_costly)


class _How(NamedTuple):
    """Settings of `checkpoint`: those that the compiler traces, and those without it."""

    compiled: dict[str, Any]
    eager: dict[str, Any]


_WHOLE = _How({"use_reentrant": False}, {"use_reentrant": False})
# The compiler knows only torch's own function.
_SELECTIVE = _How(
    {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _keep_costly),
    },
    {"use_reentrant": False, "context_fn": _eager_contexts},
)


def _recomputed(how: _How, cls: type[nn.Module]) -> Callable[..., Any]:
    compiled, eager = how

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def run(*inputs: Any, **options: Any) -> Any:
            return cls.forward(self, *inputs, **options)

        settings = compiled if torch.compiler.is_compiling() else eager
        return checkpoint(run, *args, **settings, **kwargs)

    return forward
