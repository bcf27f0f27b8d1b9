"""Stored tensors that the model has no place for, and which of them may stay unread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import nn

from shardwise.errors import UserError
from shardwise.internals.hugging_face import may_be_absent, may_stay_unread
from shardwise.model.stored import StoredWeights

# transformers' classes do not list these, because they concern many families: old files hold
# buffers that models compute today, under another module's name.
_MOVED_BUFFERS = {
    "rotary_emb.inv_freq": r"rotary_emb\.inv_freq$",
    "position_ids": r"(^|\.)position_ids$",
}
# Files as old as GPT-2 hold each block's causal mask, and the value that masked scores get.
_OLD_MASK = re.compile(r"\.(bias|causal_mask)$")
_OLD_MASK_VALUE = re.compile(r"\.masked_bias$")


def validate_leftovers(
    left: Mapping[str, str],
    model: nn.Module,
    files: StoredWeights,
    place: Path,
    ignore: Sequence[str],
) -> None:
    """Raise for stored tensors that nothing took.

    `left` maps a stored name to the model's name for it, which transformers' own lists use.
    """
    expected = re.compile("|".join(f"({p})" for p in (*_family_patterns(model), *ignore)) or "(?!)")
    unknown = [
        key
        for key, name in left.items()
        if not expected.search(key)
        and not expected.search(name)
        and not _is_old_mask(key, files.shape(key))
    ]
    if unknown:
        raise UserError(
            f"{len(unknown)} tensors in {place} have no place in the model",
            why=f"first of them: {', '.join(unknown[:3])}; a model that leaves them out may not be "
            "the model that was saved",
            fix="check that model.name and the weights are of one family; to leave these "
            f"tensors unread: model.ignore_weights={_advice(unknown)}",
        )


def may_be_missing(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The `names` that the family's files need not have."""
    patterns = may_be_absent(model)
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def _family_patterns(model: nn.Module) -> list[str]:
    """Patterns of tensors that transformers itself leaves unread."""
    buffers = [name for name, _ in model.named_buffers()]
    moved = [
        pattern
        for ending, pattern in _MOVED_BUFFERS.items()
        if any(name.endswith(ending) for name in buffers)
    ]
    return [*may_stay_unread(model), *moved]


def _is_old_mask(key: str, shape: Sequence[int]) -> bool:
    """Whether this is an old mask, by name and shape, so that a learned bias that nothing took
    stays an error."""
    if _OLD_MASK_VALUE.search(key):
        return not shape
    is_square = len(shape) == 4 and shape[:2] == [1, 1] and shape[2] == shape[3] > 1
    return bool(_OLD_MASK.search(key)) and is_square


def _advice(unknown: Sequence[str]) -> str:
    """Patterns that a shell takes: names up to their first number, or their first two parts
    where they have no number."""
    starts = dict.fromkeys(_start_of(name) for name in unknown)
    return "'[" + ", ".join("^" + start.replace(".", r"\.") for start in starts) + "]'"


def _start_of(name: str) -> str:
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1 if numbers else 2])
