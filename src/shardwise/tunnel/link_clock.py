"""The time that emulated links take: on a GPU's streams, on the host, or none.

A clock carries a collective: it does the local work, which moves real data, and then holds the
stream until the modelled time is over.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.internals.functions import occupy_stream

_TRIAL_CYCLES = 20_000_000


@dataclass(frozen=True, slots=True)
class Spent:
    """The modelled time of a step's collectives, and the time that they took."""

    asked_s: float
    took_s: float


class LinkClock(Protocol):
    """Lets the time of collectives pass."""

    def carry(self, wire: str, what: Hashable, seconds: float, work: Callable[[], None]) -> None:
        """Do `work`, and hold `wire` for `seconds` in total. `what` is the same for collectives
        that are alike."""

    def mark(self) -> Any:
        """The moment at which all work that was started so far is done."""

    def seconds(self, start: Any, end: Any) -> float:
        """The seconds between two marks; call it after `finish`."""

    def finish(self) -> None:
        """Wait until everything that was started is done."""

    def settle(self) -> Spent:
        """The collectives since the last call; call it after `finish`."""


class StoppedClock:
    """The clock for fake tensors: nothing takes any time."""

    def carry(self, wire: str, what: Hashable, seconds: float, work: Callable[[], None]) -> None:
        """Do the work only."""
        work()

    def mark(self) -> None:
        """There is only one moment."""

    def seconds(self, start: None, end: None) -> float:
        """No seconds pass."""
        return 0.0

    def finish(self) -> None:
        """Nothing is ever under way."""

    def settle(self) -> Spent:
        """Nothing was spent."""
        return Spent(0.0, 0.0)


class HostClock:
    """The clock without streams: the process itself sleeps, so nothing overlaps and all is
    exposed."""

    def __init__(self) -> None:
        self._asked_s = self._took_s = 0.0

    def carry(self, wire: str, what: Hashable, seconds: float, work: Callable[[], None]) -> None:
        """Work, then sleep for the rest of the time."""
        started = time.perf_counter()
        work()
        time.sleep(max(0.0, started + seconds - time.perf_counter()))
        self._asked_s += seconds
        self._took_s += time.perf_counter() - started

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """The seconds by the host's clock."""
        return end - start

    def finish(self) -> None:
        """The host does one thing after the other."""

    def settle(self) -> Spent:
        """Read and start anew."""
        spent = Spent(self._asked_s, self._took_s)
        self._asked_s = self._took_s = 0.0
        return spent


@dataclass(frozen=True, slots=True)
class _Span:
    what: Hashable
    seconds: float
    wait_s: float
    start: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def took_s(self) -> float:
        return self.start.elapsed_time(self.end) / 1e3


class CudaClock:
    """The clock on the stream from which FSDP2 calls, so compute runs beside it as beside NCCL.

    The wait is the rest of the modelled time after the local copies. The time of the copies is
    learnt from collectives over free links. The rate at which the GPU counts cycles is
    corrected after every step, because its clock falls under load.
    """

    def __init__(self) -> None:
        self._cycles_per_s = _measure_cycles_per_s()
        self._local_s: dict[Hashable, float] = {}
        self._last: dict[str, torch.cuda.Event] = {}
        self._spans: list[_Span] = []

    def carry(self, wire: str, what: Hashable, seconds: float, work: Callable[[], None]) -> None:
        """Queue behind the wire's last collective: one communicator runs one at a time."""
        stream = torch.cuda.current_stream()
        if wire in self._last:
            stream.wait_event(self._last[wire])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        work()
        wait_s = max(0.0, seconds - self._local_s.get(what, 0.0))
        _spin(int(wait_s * self._cycles_per_s))
        end.record(stream)
        self._last[wire] = end
        self._spans.append(_Span(what, seconds, wait_s, start, end))

    def mark(self) -> torch.cuda.Event:
        """The moment at which the compute stream gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The seconds by the device's clock."""
        return start.elapsed_time(end) / 1e3

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def settle(self) -> Spent:
        """Read the events, and learn from them for the next step."""
        spans, self._spans = self._spans, []
        self._learn_local([span for span in spans if span.seconds == 0])
        self._correct_rate([span for span in spans if span.wait_s > 0])
        return Spent(sum(span.seconds for span in spans), sum(span.took_s for span in spans))

    def _learn_local(self, spans: list[_Span]) -> None:
        by_what: dict[Hashable, list[float]] = defaultdict(list)
        for span in spans:
            by_what[span.what].append(span.took_s)
        self._local_s |= {what: statistics.median(times) for what, times in by_what.items()}

    def _correct_rate(self, spans: list[_Span]) -> None:
        asked = sum(span.wait_s for span in spans)
        waited = sum(span.took_s - self._local_s.get(span.what, 0.0) for span in spans)
        if asked > 0 and waited > 0:
            # It is bounded, because a disturbed step says little about the clock.
            self._cycles_per_s *= min(1.5, max(0.67, asked / waited))


def _measure_cycles_per_s() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _spin(_TRIAL_CYCLES)
    start.record()
    _spin(_TRIAL_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return _TRIAL_CYCLES / (start.elapsed_time(end) / 1e3)


def _spin(cycles: int) -> None:
    if cycles > 0:
        occupy_stream(cycles)
