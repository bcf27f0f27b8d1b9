"""The progress of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.checkpoint.eval_history import HeldOut


@dataclass(slots=True)
class Reached:
    """Updates made, and global batches read, which skipped ones add to."""

    step: int = 0
    position: int = 0
    shift: int = 0
    """Sequences that the place of every batch is shifted by: not 0 once a batch had another size.
    """

    tokens: int = 0
    """Tokens that the weights have learnt from."""

    last_loss: float | None = None
    """The loss that was logged last."""

    held_out: HeldOut = field(default_factory=HeldOut)
    """What evaluations have found so far."""

    bad_in_a_row: int = 0
    rollbacks: int = 0
