"""Requests to stop that a launcher passes on to its ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from shardwise.errors import ExitCode, UserError
from shardwise.launch.lookout import Seen
from shardwise.training.signals import stop_signals_handled_by

_ANSWERS = (
    b"\nstopping: what was trained is saved first\n",
    b"\nstill stopping; press Ctrl-C once more to end without a save\n",
    b"\nending without a save\n",
)


class SignalRelay:
    """Passes a request to ranks that train, which save and leave, and ends ranks that do not train
    yet.

    Where a rank has not made its first step, no rank has anything to save, so all end at once. The
    first Ctrl-C is answered at once, the second says what a third one does: it ends the ranks
    without a save.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.has_saved = True
        """False where ranks were ended without a save: there was nothing to keep, or no wish to."""

        self._pressed = 0
        self._told: dict[int, signal.Signals] = {}

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.number = number
        if number == signal.SIGINT:
            self._pressed += 1
            # A handler may run inside of a print, so this goes past Python's buffers.
            with suppress(OSError):
                os.write(2, _ANSWERS[min(self._pressed, len(_ANSWERS)) - 1])

    @property
    def _insists(self) -> bool:
        return self._pressed >= len(_ANSWERS)

    def deliver(self, ranks: list[Seen]) -> None:
        """Signal each rank once, also ranks that start later."""
        if self.number is None or not ranks:
            return
        request = signal.Signals(self.number)
        if self._insists:
            request, self.has_saved = signal.SIGKILL, False
        elif not all(one.has_begun for one in ranks):
            # By default the signal ends a process at once. A rank that trains already, and could
            # not say so, saves.
            request, self.has_saved = signal.SIGTERM, False
        for one in ranks:
            if self._told.get(one.pid) != request:
                self._told[one.pid] = request
                with suppress(ProcessLookupError):
                    os.kill(one.pid, request)

    def explain(self, error: UserError) -> UserError:
        """The error after a request, instead of how the ranks ended."""
        if self.number is None or self.has_saved or error.code == ExitCode.PREEMPTED:
            return error
        name = signal.Signals(self.number).name
        if self._insists:
            return UserError(
                f"stopped by {name}, three times; what was trained since the last save is lost",
                fix="the same command goes on from the newest checkpoint",
                code=ExitCode.WORKER_DIED,
            )
        return stopped_before_training(name)


def stopped_before_training(name: str) -> UserError:
    """The error where nothing was trained since the start, so nothing was lost."""
    return UserError(
        f"stopped by {name} before the first step; nothing was trained",
        fix="run the same command again",
        code=ExitCode.PREEMPTED,
    )


@contextmanager
def relayed_signals() -> Iterator[SignalRelay]:
    """A relay for the signals that ask to stop, while the block runs."""
    relay = SignalRelay()
    with stop_signals_handled_by(relay.note):
        yield relay
