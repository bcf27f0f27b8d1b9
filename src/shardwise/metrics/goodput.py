"""Where the time of a run went, over all its starts: what was productive, and what was not."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = ("productive", "compile", "data", "checkpoint", "restore", "recompute", "idle")
_Event = Mapping[str, Any]


def goodput(events: Sequence[_Event]) -> dict[str, float]:
    """Seconds by kind; their sum is the time from the first event to the last.

    `productive` steps are those that no later start had to do again, without their wait for data;
    `recompute` is the time of the others. What the first logged step of a start takes above a
    usual one is `compile`: compilation and warm-up. `restore` runs from a start's first event to
    its first step's begin, `checkpoint` is what the loop waited for saves, and `idle` is the rest:
    evaluations, the gaps between a failure and the next start.
    """
    spent = dict.fromkeys(KINDS, 0.0)
    if not events:
        return spent
    windows = _windows(events)
    steady = [window.step_s for window in windows if not window.first]
    usual = statistics.median(steady) if steady else 0.0
    for window in windows:
        seconds = window.step_s * window.steps
        extra = max(0.0, seconds - usual * window.steps) if window.first and usual else 0.0
        waited = window.data_share * (seconds - extra)
        lost = (seconds - extra - waited) * window.lost / window.steps
        spent["compile"] += extra
        spent["data"] += waited
        spent["recompute"] += lost
        spent["productive"] += seconds - extra - waited - lost
    saves = [e for e in events if e["event"] in ("checkpoint", "checkpoint_failed")]
    spent["checkpoint"] = sum(float(event["stage_s"]) for event in saves)
    spent["restore"] = sum(_restores(events))
    whole = float(events[-1]["time"]) - float(events[0]["time"])
    spent["idle"] = max(0.0, whole - sum(spent.values()))
    return spent


def productive_share(spent: Mapping[str, float]) -> float:
    """Goodput: the productive share of all the time."""
    whole = sum(spent.values())
    return spent["productive"] / whole if whole else 0.0


class _Window:
    """The steps between two logged ones."""

    def __init__(self, event: _Event, previous: int, *, first: bool) -> None:
        self.last = int(event["step"])
        self.steps = max(1, self.last - previous)
        self.step_s = float(event["step_s"])
        self.data_share = float(event["data_share"])
        self.first = first
        self.lost = 0


def _windows(events: Sequence[_Event]) -> list[_Window]:
    """All logged windows; of each, how many of its steps a later start did again."""
    found: list[_Window] = []
    previous, first = 0, True
    for event in events:
        if event["event"] == "start":
            previous, first = int(event["step"]), True
            for window in found:
                begin = window.last - window.steps
                window.lost = min(
                    window.steps, max(window.lost, window.last - max(begin, previous))
                )
        elif event["event"] == "step":
            found.append(_Window(event, previous, first=first))
            previous, first = int(event["step"]), False
    return found


def _restores(events: Sequence[_Event]) -> list[float]:
    """From the first event of each resumed start to the begin of its first step."""
    found, began = [], None
    for event in events:
        if event["event"] == "data":
            began = float(event["time"])
        elif event["event"] == "step" and began is not None:
            found.append(max(0.0, float(event["time"]) - float(event["step_s"]) - began))
            began = None
    return found
