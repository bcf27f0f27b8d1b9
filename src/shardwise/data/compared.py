"""The documents of a micro-batch whose log-probabilities are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from shardwise.data.sequences import IGNORE_INDEX, PADDING
from shardwise.data.sequences import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class Compared:
    """Documents in the order of the micro-batch. Those of a pair follow each other, the chosen one
    first."""

    lengths: Tensor
    """The tokens of each stretch of the micro-batch, whose tokens form one row: documents and
    padding, int64."""

    places: Tensor
    """Which stretches are documents, int64. What follows has a value for each of them."""

    numbers: Tensor
    """Their numbers among all documents, int64."""

    preferred: Tensor
    """Whether they are preferred, bool."""

    num_tokens: Tensor
    """The tokens of each that are trained on, fp32."""

    def __len__(self) -> int:
        return len(self.places)

    def pinned(self) -> Compared:
        """The same in page-locked memory."""
        return Compared(*(getattr(self, item.name).pin_memory() for item in fields(self)))

    def to(self, device: torch.device) -> Compared:
        """The same on a device."""
        return Compared(
            *(getattr(self, item.name).to(device, non_blocking=True) for item in fields(self))
        )


def place_compared(rows: Sequence[TokenSequence]) -> Compared | None:
    """The documents of a micro-batch; None where its sequences have none to compare."""
    found = [row.compared for row in rows if row.compared is not None]
    if not found:
        return None
    seq_len = len(rows[0].inputs)
    # Where one document has a sequence of its own, attention needs no starts.
    starts = [np.zeros(1, dtype=np.int64) if row.starts is None else row.starts for row in rows]
    lengths = np.concatenate([np.diff(first, append=seq_len) for first in starts])
    firsts = np.concatenate([first + at * seq_len for at, first in enumerate(starts)])
    is_trained = np.concatenate([row.labels for row in rows]) != IGNORE_INDEX
    num_tokens = np.add.reduceat(is_trained.astype(np.int64), firsts)
    numbers = np.concatenate([each.numbers for each in found])
    preferred = np.concatenate([each.preferred for each in found])
    places = np.flatnonzero(numbers != PADDING)
    return Compared(
        torch.from_numpy(lengths),
        torch.from_numpy(places),
        torch.from_numpy(numbers[places]),
        torch.from_numpy(preferred[places]),
        torch.from_numpy(num_tokens[places].astype(np.float32)),
    )
