"""What a run minimises: the loss of a micro-batch, and what its sum is divided by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.data.loader import MicroBatch
from shardwise.model.sequence_split import SequenceSplit
from shardwise.model.split_attention import part_arguments
from shardwise.training.document_attention import kept_apart


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The loss of one micro-batch."""

    total: Tensor
    """Summed over the terms of the objective."""

    scores: Tensor | None = None
    """Sums that tell how well answers are told apart, by `training.preference_losses`; None
    where none are compared."""


class Objective(Protocol):
    """A sum over terms, such as tokens or pairs, whose mean over all ranks is minimised."""

    def prepare(self, model: Any, batches: Sequence[MicroBatch], device: torch.device) -> None:
        """Find out what the losses of a step share, before the first of its micro-batches. All
        ranks call this together."""
        ...

    def num_terms(self, batch: MicroBatch) -> int:
        """The terms of a micro-batch."""
        ...

    def loss(self, model: Any, batch: MicroBatch, device: torch.device) -> BatchLoss:
        """The loss of a micro-batch, whose gradient can be taken."""
        ...


@dataclass(frozen=True, slots=True)
class NextToken:
    """The cross-entropy of every token that counts."""

    split: SequenceSplit | None = None
    """How ranks divide sequences; None where each has whole ones."""

    def prepare(self, model: Any, batches: Sequence[MicroBatch], device: torch.device) -> None:
        """Tokens share nothing."""

    def num_terms(self, batch: MicroBatch) -> int:
        """The labels that count."""
        return batch.num_valid_tokens

    def loss(self, model: Any, batch: MicroBatch, device: torch.device) -> BatchLoss:
        """The cross-entropy, summed over this rank's tokens."""
        inputs, labels, more = model_inputs(batch, device, self.split)
        return BatchLoss(model.sum_loss(inputs, labels, **more))


def model_inputs(
    batch: MicroBatch, device: torch.device, split: SequenceSplit | None = None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Inputs and labels on the device, this rank's own where ranks divide sequences, and what else
    the model is given."""
    inputs, labels = (side.to(device, non_blocking=True) for side in (batch.inputs, batch.labels))
    apart = {} if batch.documents is None else kept_apart(batch.documents, device)
    if split is None:
        return inputs, labels, apart
    # Each label is the token after its input already, so none is lost where chunks meet.
    more = part_arguments(split, inputs, apart.get("position_ids"), apart.get("cu_seq_lens_q"))
    return split.own(inputs), split.own(labels), more
