"""How much of a run's time was productive, over all its starts, and where the rest went."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

KINDS = ("productive", "compile", "data", "checkpoint", "restore", "recompute", "idle")
# After these events a run has gone back to `step`.
_GO_BACK = ("start", "rollback")
# These events end a command in order. The pause until the next command counts for nothing.
_ENDS = ("end", "stopped")
_Event = Mapping[str, Any]


def goodput(events: Sequence[_Event]) -> dict[str, float]:
    """Seconds by kind. Their sum is the time from the first event to the last, without the pauses
    between a command that ended in order and the next one.

    `productive` steps are those that no later start repeated, without their wait for data;
    `recompute` is the time of the repeated ones. `compile` is what the first logged step of a start
    takes above a usual one: compilation and warm-up. `restore` runs from a start's first event to
    the beginning of its first step. `checkpoint` is what the loop waited for saves. `idle` is the
    rest: evaluations, and the gap between a failure and the next start.
    """
    spent = dict.fromkeys(KINDS, 0.0)
    # The verdict on a run is written after its ranks have ended.
    events = [event for event in events if event["event"] != "gates"]
    if not events:
        return spent
    windows = _windows(events)
    steady = [window.step_s for window in windows if not window.first]
    usual = statistics.median(steady) if steady else 0.0
    for window in windows:
        extra, waited, worked = window.split(usual)
        lost = worked * window.lost / window.steps
        spent["compile"] += extra
        spent["data"] += waited
        spent["recompute"] += lost
        spent["productive"] += worked - lost
    saves = [e for e in events if e["event"] in ("checkpoint", "checkpoint_failed")]
    spent["checkpoint"] = sum(float(event["stage_s"]) for event in saves)
    spent["restore"] = sum(_restores(events))
    spent["idle"] = max(0.0, _at_work(events) - sum(spent.values()))
    return spent


def _at_work(events: Sequence[_Event]) -> float:
    return sum(
        float(event["time"]) - float(before["time"])
        for before, event in pairwise(events)
        if before["event"] not in _ENDS
    )


def productive_share(spent: Mapping[str, float]) -> float:
    """Goodput: the productive share of all the time."""
    whole = sum(spent.values())
    return spent["productive"] / whole if whole else 0.0


class Productive:
    """The productive seconds while a run goes on. What was counted is never subtracted.

    Of a repeated step the first time counts here. The first window of a start waits until there is
    a usual one to compare it with.
    """

    def __init__(self) -> None:
        self._place = _RunPosition()
        self._furthest = 0
        self._recent: deque[float] = deque(maxlen=99)
        self._waiting: list[tuple[_Window, float]] = []

    def see(self, event: _Event) -> float:
        """Seconds that an event adds."""
        window = self._place.follow(event)
        if window is None:
            return 0.0
        new = max(0, window.last - max(self._furthest, window.last - window.steps))
        self._furthest = max(self._furthest, window.last)
        self._waiting.append((window, new / window.steps))
        if not window.first:
            self._recent.append(window.step_s)
        if not self._recent:
            return 0.0
        usual, waiting = statistics.median(self._recent), self._waiting
        self._waiting = []
        return sum(share * each.split(usual)[2] for each, share in waiting)


class _Window:
    """The steps between two logged ones."""

    def __init__(self, event: _Event, previous: int, *, first: bool) -> None:
        self.last = int(event["step"])
        self.steps = max(1, self.last - previous)
        self.step_s = float(event["step_s"])
        self.data_share = float(event["data_share"])
        self.first = first
        self.lost = 0

    def split(self, usual: float) -> tuple[float, float, float]:
        """Seconds of (warm-up, wait for data, work), where a step usually takes `usual`."""
        seconds = self.step_s * self.steps
        extra = max(0.0, seconds - usual * self.steps) if self.first and usual else 0.0
        waited = self.data_share * (seconds - extra)
        return extra, waited, seconds - extra - waited


class _RunPosition:
    """The step that a run has reached, by its events."""

    def __init__(self) -> None:
        self.step, self.fresh = 0, True

    def follow(self, event: _Event) -> _Window | None:
        """The window that the event ends, if any."""
        if event["event"] in _GO_BACK:
            self.step, self.fresh = int(event["step"]), self.fresh or event["event"] == "start"
        if event["event"] != "step":
            return None
        window = _Window(event, self.step, first=self.fresh)
        self.step, self.fresh = window.last, False
        return window


def _windows(events: Sequence[_Event]) -> list[_Window]:
    """All logged windows, and how many steps of each were repeated later."""
    found: list[_Window] = []
    place = _RunPosition()
    for event in events:
        if (window := place.follow(event)) is not None:
            found.append(window)
        elif event["event"] in _GO_BACK:
            for window in found:
                begin = window.last - window.steps
                window.lost = min(
                    window.steps, max(window.lost, window.last - max(begin, place.step))
                )
    return found


def _restores(events: Sequence[_Event]) -> list[float]:
    """Seconds from the first event of each resumed start to the beginning of its first step."""
    found, began = [], None
    for event in events:
        if event["event"] == "data":
            began = float(event["time"])
        elif event["event"] == "step" and began is not None:
            found.append(max(0.0, float(event["time"]) - float(event["step_s"]) - began))
            began = None
    return found
