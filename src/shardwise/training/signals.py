"""Requests to stop: a signal sets a flag, and the loop saves at the next step edge."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Schedulers warn with one of these before they kill; Ctrl-C is a person's way to say the same.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Whether this rank was asked to stop, and by what."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: nothing but a note, for it may run between any two instructions."""
        self.name = signal.Signals(number).name


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn stop signals into a StopRequest while the block runs."""
    request = StopRequest()
    with stop_signals_handled_by(request.note):
        yield request


@contextmanager
def stop_signals_handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Send the stop signals to `handler` while the block runs; then as before."""
    previous = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)
