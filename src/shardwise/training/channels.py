"""How a run communicates with its surroundings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardwise.lease.lease import UNFENCED, Fence
from shardwise.metrics.callbacks import Callbacks
from shardwise.metrics.events import EventLog
from shardwise.training.heartbeat import Heartbeat
from shardwise.training.signals import StopRequest


@dataclass(frozen=True, slots=True)
class Channels:
    """The channels of a run: the record, the console, the launcher."""

    events: EventLog
    say: Callable[[str], None]
    stop: StopRequest
    heartbeat: Heartbeat
    fence: Fence = UNFENCED
    callbacks: Callbacks = field(default_factory=Callbacks)
    """The user's own functions; none but on the first rank."""

    @property
    def wants_stop(self) -> bool:
        """Whether a signal came, or another job has taken the run directory."""
        return bool(self.stop) or self.fence.lost
