"""Batches: which rank reads which sequences in which step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from shardwise.data import sequences as seq
from shardwise.data.compared import Compared, place_compared
from shardwise.data.documents import Documents, place_documents
from shardwise.data.grouping import LengthOrder
from shardwise.data.order import index_at


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass on one rank."""

    inputs: torch.Tensor
    """Token ids, int64, [micro_batch, seq_len]."""

    labels: torch.Tensor
    """The token after each input, or IGNORE_INDEX; same type and shape."""

    num_valid_tokens: int
    """Labels that count."""

    documents: Documents | None = None
    """Documents that attention keeps apart; None where attention covers the whole sequence."""

    compared: Compared | None = None
    """Documents that are compared; None where each token is trained on by itself."""

    def pinned(self) -> MicroBatch:
        """The same in pinned memory, from which copies to a GPU are asynchronous."""
        return MicroBatch(
            self.inputs.pin_memory(),
            self.labels.pin_memory(),
            self.num_valid_tokens,
            None if self.documents is None else self.documents.pinned(),
            None if self.compared is None else self.compared.pinned(),
        )


@dataclass(frozen=True, slots=True)
class BatchLoader:
    """One rank's part of every global batch.

    The global batch of a step is a range of positions that does not depend on the ranks. Each rank
    takes a contiguous part of it, so a run that resumes on other ranks reads the same batches.
    """

    sequences: seq.SequenceSet
    _: KW_ONLY
    seed: int
    shuffle: bool
    global_batch: int
    micro_batch: int
    accumulation: int
    rank: int
    num_ranks: int
    """The data-parallel size."""

    shift: int = 0
    """Sequences that the place of every batch is shifted by, where earlier ones had another size.
    """

    order: LengthOrder | None = None
    """Batches of similar lengths, each as long as its longest sequence on all ranks; None for
    sequences in their usual order and at full length."""

    def __post_init__(self) -> None:
        if self.global_batch != self.micro_batch * self.accumulation * self.num_ranks:
            raise ValueError(
                f"global batch {self.global_batch} is not micro batch {self.micro_batch} x "
                f"accumulation {self.accumulation} x {self.num_ranks} ranks"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} is not one of {self.num_ranks}")

    def step_batches(self, index: int) -> list[MicroBatch]:
        """This rank's micro-batches of one global batch, counted from 0."""
        mine = self.accumulation * self.micro_batch
        if self.order is not None:
            found, length = self.order.batch(index)
            own = found[self.rank * mine : (self.rank + 1) * mine]
            return [
                _stack(
                    [_cut(self.sequences.get(at), length) for at in own[start:][: self.micro_batch]]
                )
                for start in range(0, mine, self.micro_batch)
            ]
        first = self.shift + index * self.global_batch + self.rank * mine
        return [
            self._read(range(start, start + self.micro_batch))
            for start in range(first, first + mine, self.micro_batch)
        ]

    def _read(self, positions: range) -> MicroBatch:
        length = len(self.sequences)
        indices = (index_at(self.seed, place, length, self.shuffle) for place in positions)
        rows = [self.sequences.get(index) for index in indices]
        return _stack(rows)


def eval_batches(
    sequences: seq.SequenceSet,
    *,
    num_sequences: int,
    micro_batch: int,
    rank: int,
    num_ranks: int,
) -> Iterator[MicroBatch]:
    """This rank's part of the first sequences, the same for every evaluation.

    All ranks get the same number of micro-batches of the same shape, because every rank must take
    part in FSDP's collectives. Rows beyond the end have no label that counts.
    """
    stop = min(num_sequences, len(sequences))
    blank = _blank(sequences)
    for round_start in range(0, stop, micro_batch * num_ranks):
        first = round_start + rank * micro_batch
        rows = [
            sequences.get(index) if index < stop else blank
            for index in range(first, first + micro_batch)
        ]
        yield _stack(rows)


def _cut(row: seq.Sequence, length: int) -> seq.Sequence:
    """The first tokens of a sequence, behind which there is only padding."""
    return seq.Sequence(row.inputs[:length], row.labels[:length])


def _blank(sequences: seq.SequenceSet) -> seq.Sequence:
    """A sequence without a label that counts, of the form of the others."""
    inputs = np.zeros(sequences.seq_len, dtype=np.int64)
    first = sequences.get(0)
    starts = None if first.starts is None else np.zeros(1, dtype=np.int64)
    nothing = seq.ComparedRow(np.array([seq.PADDING]), np.zeros(1, dtype=np.bool_))
    compared = None if first.compared is None else nothing
    return seq.Sequence(inputs, np.full_like(inputs, seq.IGNORE_INDEX), starts, compared)


def _stack(rows: Sequence[seq.Sequence]) -> MicroBatch:
    inputs = np.stack([row.inputs for row in rows])
    labels = np.stack([row.labels for row in rows])
    starts = [row.starts for row in rows if row.starts is not None]
    return MicroBatch(
        inputs=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        num_valid_tokens=int((labels != seq.IGNORE_INDEX).sum()),
        documents=place_documents(starts, inputs.shape[1]) if starts else None,
        compared=place_compared(rows),
    )
