"""One block of a model, and what the model calls it with, to be counted on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from shardwise.facts.block_work import Attention
from shardwise.internals.dispatch_mode import tree_leaves
from shardwise.kernels.attention import causal_attention
from shardwise.model.blocks import find_units, iter_modules
from shardwise.model.masks import Mask, described_mask
from shardwise.parallel.expert_pass import apply_experts
from shardwise.parallel.gated_mlp import apply_gated_mlp
from shardwise.parallel.head_norms import apply_head_norms
from shardwise.parallel.remat import apply_remat

_COUNTED = "shardwise_counted"


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A block, and what it is called with."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def learns(self) -> Tensor:
        """The hidden state that it takes: the first tensor of floats."""
        return next(t for t in self.tensors() if t.requires_grad)

    def tensors(self) -> list[Tensor]:
        """Everything that it takes."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class Alike:
    """Blocks with the same layers."""

    first: nn.Module
    windows: dict[int | None, int]
    """How many of them have which sliding window."""


def find_alike(model: PreTrainedModel) -> list[Alike]:
    """The kinds of blocks that a model has."""
    found: dict[Any, list[nn.Module]] = {}
    for unit in find_units(model).blocks:
        for block in iter_modules(model, unit):
            layers = tuple((name, type(module)) for name, module in block.named_modules())
            shapes = tuple(parameter.shape for parameter in block.parameters())
            found.setdefault((layers, shapes), []).append(block)
    return [_alike(blocks) for blocks in found.values()]


def _alike(blocks: list[nn.Module]) -> Alike:
    windows: dict[int | None, int] = {}
    for block in blocks:
        window = window_of(block)
        windows[window] = windows.get(window, 0) + 1
    return Alike(blocks[0], windows)


def window_of(block: nn.Module) -> int | None:
    """The sliding window that a block's attention keeps as its own, where it keeps one."""
    kept = (getattr(module, "sliding_window", None) for module in block.modules())
    return next(filter(None, map(_size, kept)), None)


def _size(window: Any) -> int | None:
    return window if isinstance(window, int) and window > 0 else None


class _Captured(Exception):
    """The call of the block has been seen, and what follows does not matter."""


def capture_call(model: PreTrainedModel, block: nn.Module, seq_len: int) -> BlockCall:
    """What the model calls the block with, for one sequence."""
    calls: list[BlockCall] = []

    def capture(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_learning(block, args, kwargs))
        raise _Captured

    handle = block.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, seq_len, dtype=torch.long), use_cache=False)
    except _Captured:
        pass
    finally:
        handle.remove()
    return calls[0]


def _learning(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
    """The call with a hidden state that needs a gradient, as it does in training."""
    states = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    hidden = next(state for state in states if state.is_floating_point())
    fresh = hidden.detach().requires_grad_()

    def swapped(value: Any) -> Any:
        return fresh if value is hidden else value

    return BlockCall(block, tuple(map(swapped, args)), {n: swapped(v) for n, v in kwargs.items()})


@contextmanager
def changed(block: nn.Module, *, own: bool, recompute: str) -> Iterator[bool]:
    """Inside, the block is changed as `parallelize` would change it. Yields whether our kernels
    leave it as it is."""
    classes = [(module, type(module)) for module in block.modules()]
    apply_head_norms([block])
    without = [type(module) for module in block.modules()]
    if own:
        apply_gated_mlp([block])
        apply_experts([block])
    is_same = [type(module) for module in block.modules()] == without
    apply_remat([block], recompute)
    try:
        yield is_same
    finally:
        for module, cls in classes:
            module.__class__ = cls


def counted_attention(attention: str, seen: list[Attention]) -> str:
    """The name of an attention that saves what a kernel saves, and notes its sizes in `seen`.

    `eager` is no kernel, and is counted as it is.
    """
    if attention == "eager":
        return attention

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        *_: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if not torch.compiler.is_compiling():
            seen.append(_sizes(module, query, key, value, mask, options))
        sides = (side.transpose(1, 2) for side in (query, key, value))
        return causal_attention(*sides, 1.0)[0], None

    AttentionInterface.register(_COUNTED, attend)
    AttentionMaskInterface.register(_COUNTED, described_mask)
    return _COUNTED


def _sizes(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    options: dict[str, Any],
) -> Attention:
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    return Attention(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_width=query.shape[3],
        value_width=value.shape[3],
        window=_size(window),
        softcap=options.get("softcap") is not None,
        sinks=options.get("s_aux") is not None,
        other_mask=mask is not None and mask.only_tiles,
    )
