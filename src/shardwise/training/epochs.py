"""Epochs become steps once the sequences are counted."""

from __future__ import annotations

import math
from dataclasses import replace

from shardwise.checkpoint.store import Checkpoint
from shardwise.training.session import Say, Session


def settle_epochs(session: Session, found: Checkpoint | None, say: Say) -> Session:
    """The session of a run with as many steps as its epochs take; the last one is filled up from
    the pass after. All ranks have the same sequences, so all of them count alike.

    Steps before `found` may have had another batch.
    """
    plan, sequences = session.plan, session.data.num_sequences
    epochs, batch = plan.settings.train.epochs, plan.decided.global_batch
    if epochs is None:
        return session
    left, done = epochs * sequences, 0
    if found is not None and (found.manifest.shift or found.manifest.global_batch != batch):
        left, done = left - found.manifest.next_sequence, found.step
    steps = done + max(1 - done, math.ceil(left / batch))
    counted = plan.with_steps(steps)
    counted.validate_steps()
    say(f"train.epochs={epochs:g} over {sequences:,} sequences: {steps:,} steps of {batch}")
    return replace(session, plan=counted)
