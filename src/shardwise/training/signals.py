"""Requests to stop: a signal sets a flag, and the loop saves at the next step edge."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Schedulers warn with one of these before they kill; Ctrl-C is a person's way to say the same.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
Handler = Callable[[int, FrameType | None], None] | signal.Handlers


class StopRequest:
    """Whether this rank was asked to stop, and by what."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: nothing but a note, for it may run between any two instructions."""
        self.name = signal.Signals(number).name

    def listen(self) -> None:
        """Note signals from now on. Before the first step they end the process, as by default:
        there is nothing to save, and libraries that import or compile would not let a handler run.
        """
        handle_stop_signals(self.note)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """A request that may listen while the block runs; afterwards signals do what they did."""
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield StopRequest()
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


@contextmanager
def stop_signals_handled_by(handler: Handler) -> Iterator[None]:
    """Send the stop signals to `handler` while the block runs; then as before."""
    with stop_requests():
        handle_stop_signals(handler)
        yield


def handle_stop_signals(handler: Handler) -> None:
    """Send the stop signals to `handler` from now on."""
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
