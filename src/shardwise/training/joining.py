"""The outer step as a part of the loop: when it is made, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from shardwise.training.channels import Channels
from shardwise.training.heartbeat import Phase
from shardwise.training.outer import Standing
from shardwise.training.session import Session
from shardwise.units import format_bytes

OuterStep = Callable[[Standing], None]
"""Called on all ranks after each update. Sites that step independently exchange their updates
here."""


def no_outer_step(reached: Standing) -> None:
    """Do nothing, because there is only one site."""


def outer_step_of(session: Session, channels: Channels) -> OuterStep:
    """What a session does after each update."""
    outer = session.outer
    if outer is None:
        return no_outer_step
    outer.beat = channels.heartbeat.beat

    def join(reached: Standing) -> None:
        # Waiting for other sites may take longer than a step.
        with channels.heartbeat.during(Phase.JOINING):
            joined = outer.step(reached)
        if joined is None:
            return
        channels.events.write("outer_step", step=reached.step, **asdict(joined))
        channels.say(
            f"outer step after step {reached.step}, sites {joined.sites}: "
            f"{format_bytes(joined.sent_bytes)} of each rank, waited {joined.waited_s:.2f} s, "
            f"pseudo-gradient {joined.norm:.4g}"
        )

    return join
