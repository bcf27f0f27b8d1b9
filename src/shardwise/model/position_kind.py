"""How a model knows a token's position: from a table of fixed length, by rotation, or not at
all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.facts.positions import rotary_limit

# What transformers' families call a table of positions (`wpe` is GPT-2's).
_TABLE_NAMES = ("pos", "wpe")


def find_positions(model: PreTrainedModel) -> tuple[int | None, bool]:
    """(number of positions, whether they are a table). The number is None where none is known
    or needed."""
    config: Any = model.config.get_text_config()
    if any("rotary" in type(module).__name__.lower() for module in model.modules()):
        # Falcon has rotary modules that it does not use where it biases by distance.
        unused = getattr(config, "alibi", False)
        return (None if unused else rotary_limit(config.to_dict())), False
    # MPT builds its table of biases in each forward, with this length.
    made = getattr(config, "max_seq_len", None)
    lengths = [*_table_lengths(model), *([made] if isinstance(made, int) else [])]
    # A model that also sees images has a shorter table for their patches.
    return (max(lengths), True) if lengths else (None, False)


def _table_lengths(model: nn.Module) -> Iterator[int]:
    """Positions that each learned or stored table has."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _is_table(name):
            # OPT and BART skip the first rows; RoBERTa counts from behind the padding row.
            padding = -1 if module.padding_idx is None else module.padding_idx
            offset = getattr(module, "offset", 0)
            yield module.num_embeddings - (offset if isinstance(offset, int) else 0) - padding - 1
    for name, buffer in model.named_buffers():
        # `position_ids` is one row of numbers and no table.
        if buffer.dim() == 2 and buffer.shape[0] > 1 and _is_table(name):
            yield buffer.shape[0]


def _is_table(name: str) -> bool:
    own_name = name.rpartition(".")[2]
    return any(word in own_name for word in _TABLE_NAMES)
