"""How ranks that hang are ended: they are asked, then made to show their stacks, then killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from shardwise.launch.hang import Hang, Judge
from shardwise.launch.lookout import Lookout, Seen

# A rank that was only slow saves and leaves. It is left alone for as long as it makes progress.
ASK_S = 30.0
# The time to write the stacks and to end. Where the kernel writes core files, that takes most of
# it.
STACKS_S = 10.0
# A process that remains after this is stuck in the kernel, and nothing ends it.
KILL_S = 10.0
_POLL_S = 0.1


def stop_ranks(lookout: Lookout, hang: Hang) -> list[int]:
    """End all ranks but this process. Returns those that even SIGKILL did not end.

    No request to stop is sent where a rank could not take it, or where it would save nothing.
    """
    if hang.answers:
        _send(_others(lookout), signal.SIGTERM)
        patience = Judge(ASK_S)
        _wait(lookout, lambda ranks: patience.judge(ranks) is not None)
    # Python's fault handler writes the stacks, also from inside a collective. A stopped process
    # handles the signal only after it is continued.
    _send(_others(lookout), signal.SIGABRT, signal.SIGCONT)
    _wait(lookout, _after(STACKS_S))
    return kill_ranks(lookout)


def kill_ranks(lookout: Lookout) -> list[int]:
    """Kill all ranks but this process at once. Returns those that are still there."""
    _send(_others(lookout), signal.SIGKILL)
    _wait(lookout, _after(KILL_S))
    return [one.pid for one in _others(lookout)]


def _others(lookout: Lookout) -> list[Seen]:
    return [one for one in lookout.look() if one.pid != os.getpid()]


def _wait(lookout: Lookout, is_over: Callable[[list[Seen]], bool]) -> None:
    """Wait until no rank is left, or the time is over."""
    while (ranks := _others(lookout)) and not is_over(ranks):
        time.sleep(_POLL_S)


def _after(seconds: float) -> Callable[[list[Seen]], bool]:
    deadline = time.monotonic() + seconds
    return lambda ranks: time.monotonic() > deadline


def _send(ranks: Iterable[Seen], *numbers: signal.Signals) -> None:
    for one in ranks:
        with suppress(ProcessLookupError):
            for number in numbers:
                os.kill(one.pid, number)
