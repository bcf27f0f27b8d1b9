"""Epochs become steps once the sequences are counted."""

from __future__ import annotations

import math
from dataclasses import replace

from shardwise.training.session import Say, Session


def settle_epochs(session: Session, say: Say) -> Session:
    """The session of a run with as many steps as its epochs take; the last one is filled up from
    the pass after. All ranks have the same sequences, so all of them count alike."""
    plan, sequences = session.plan, session.data.num_sequences
    epochs, batch = plan.settings.train.epochs, plan.decided.global_batch
    if epochs is None:
        return session
    steps = max(1, math.ceil(epochs * sequences / batch))
    counted = plan.with_steps(steps)
    counted.validate_steps()
    say(f"train.epochs={epochs:g} over {sequences:,} sequences: {steps:,} steps of {batch}")
    return replace(session, plan=counted)
