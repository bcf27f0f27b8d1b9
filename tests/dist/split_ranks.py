"""What ranks do in the tests of divided sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers.models.llama import modeling_llama

from shardwise.model import attention_choice
from shardwise.model.masks import Mask, Sight, pairs_of
from shardwise.model.sequence_split import SequencePart, SequenceSplit
from shardwise.model.split_attention import KERNELS, PART, attention_with, in_parts

SEQUENCES, LENGTH, WIDTH = 2, 32, 8
# Documents of both sequences: some end inside a chunk, one covers several, one is a single token.
STARTS = torch.tensor([0, 3, 4, 21, 30, 32, 45, 46, 64, 64], dtype=torch.int32)
# Of sdpa where cuDNN's kernels are the fastest, with those of a CPU in their place.
IN_PARTS = "sdpa in parts"
WINDOWS = (None, 1, 3, 5, 9, 20, 40)


class Asking(torch.nn.Module):
    """Stands for an attention layer: what `eager` reads of one."""

    num_key_value_groups = 2


# Its file spells out the plainest of all attentions.
Asking.__module__ = modeling_llama.__name__


def split_here() -> SequenceSplit:
    """The whole world divides sequences."""
    group = dist.group.WORLD
    assert group is not None
    return SequenceSplit(dist.get_rank(), dist.get_world_size(), group.group_name)


def compare_attentions(kernels: Sequence[str]) -> dict[str, float]:
    """Each kernel over divided sequences beside all pairs in one place: the worst difference of the
    result and of three gradients, by case."""
    with mock.patch.object(attention_choice, "_compiled_flex", lambda: flex_attention):
        return {
            f"{kernel}, window {window}, {'whole' if starts is None else 'documents'}": _difference(
                kernel, window, starts
            )
            for kernel in kernels
            for window in WINDOWS
            for starts in (None, STARTS)
        }


def _difference(kernel: str, window: int | None, starts: Tensor | None) -> float:
    torch.manual_seed(0)
    split = split_here()
    whole = [
        torch.randn(SEQUENCES, heads, LENGTH, WIDTH, requires_grad=True) for heads in (4, 2, 2)
    ]
    weights = torch.randn(SEQUENCES, LENGTH, 4, WIDTH)
    expected = _all_pairs(whole, window, starts)
    wanted = torch.autograd.grad((expected * weights).sum(), whole)
    mine = [split.own(side.detach().transpose(1, 2)).transpose(1, 2) for side in whole]
    # torch has no backward of FlexAttention on a CPU.
    learns = kernel != "flex_attention"
    mine = [side.requires_grad_(learns) for side in mine]
    given: dict[str, Any] = {PART: SequencePart(split, LENGTH, starts)}
    wanted_kernel, own = ("sdpa", in_parts) if kernel == IN_PARTS else (kernel, KERNELS[kernel])
    attend = attention_with(wanted_kernel, own)
    out, _ = attend(Asking(), *mine, Mask(window), scaling=0.3, **given)
    pairs = [(out, split.own(expected))]
    found = torch.autograd.grad((out * split.own(weights)).sum(), mine) if learns else wanted[:0]
    for gradient, side in zip(found, wanted, strict=False):
        pairs.append((gradient.transpose(1, 2), split.own(side.transpose(1, 2))))
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def _all_pairs(whole: list[Tensor], window: int | None, starts: Tensor | None) -> Tensor:
    """Attention by its definition."""
    query, key, value = whole
    key, value = (side.repeat_interleave(2, 1) for side in (key, value))
    documents = None
    if starts is not None:
        tokens = torch.arange(SEQUENCES * LENGTH, dtype=starts.dtype)
        documents = torch.searchsorted(starts, tokens, right=True).view(SEQUENCES, LENGTH)
    seen = pairs_of(Sight(0, 0, LENGTH), window, documents, "cpu")
    scores = (0.3 * query @ key.mT).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)
