"""What a rank saves of a block that it computes together with others.

Along the tensor axis ranks divide heads and channels, and with sequence parallelism the tokens of
norms and of the residual. What goes into attention and into the MLP is gathered, and saved whole.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.facts.models import ModelSpec
from shardwise.plan.block_memory import SavingBlocks, block_bytes
from shardwise.plan.decisions import DTYPE_BYTES, Decisions

# Vectors of the hidden size that norms and the residual save for each token, compiled and not.
_NORM_VECTORS = {True: 4, False: 9}
# Gathered inputs of a block: attention's and the MLP's.
_GATHERED = 2


def shared_bytes(model: ModelSpec, decided: Decisions) -> list[SavingBlocks]:
    """All blocks, by what one rank saves of each token that its group works on."""
    blocks = block_bytes(model, decided)
    return blocks if decided.tensor == 1 else [_part(each, model, decided) for each in blocks]


def entry_bytes(model: ModelSpec, decided: Decisions) -> float:
    """Bytes for each token of a block's input, which is what full recompute saves."""
    ranks = decided.tensor if decided.sequence_parallel else 1
    return DTYPE_BYTES[decided.param_dtype] * model.hidden_size / ranks


def _part(block: SavingBlocks, model: ModelSpec, decided: Decisions) -> SavingBlocks:
    ranks, hidden = decided.tensor, DTYPE_BYTES[decided.param_dtype] * model.hidden_size
    undivided = _GATHERED if decided.sequence_parallel else _NORM_VECTORS[decided.compile]
    elsewhere = hidden * (1 - 1 / ranks)
    return replace(
        block,
        whole=block.whole / ranks + undivided * elsewhere,
        selective=block.selective / ranks,
        gradients=block.gradients / ranks + _GATHERED * elsewhere,
    )
