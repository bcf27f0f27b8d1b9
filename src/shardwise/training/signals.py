"""Requests to stop: a signal sets a flag, and the loop saves at the end of the step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Schedulers send one of these before they kill a job. Ctrl-C is a person's request.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
Handler = Callable[[int, FrameType | None], None] | signal.Handlers


class StopRequest:
    """Whether this rank was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. It only sets a flag, because it may run between any two
        instructions."""
        self.name = signal.Signals(number).name

    def listen(self) -> None:
        """Handle signals from now on.

        Before the first step they end the process, as by default: there is nothing to save, and
        libraries that import or compile would not let a handler run.
        """
        handle_stop_signals(self.note)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """A request that may listen while the block runs. Afterwards signals do what they did
    before."""
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
