"""Where the time of profiled steps went: compute, exposed communication, copies, idle.

The four add up to the step. Communication is exposed while it runs and no compute does. A gap is a
time in which nothing runs at all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from shardwise.metrics.trace import NO_UNIT, Span, StepSpan, Trace
from shardwise.plan.axis_traffic import AXES, AxisTraffic

# A device needs a few microseconds from one kernel to the next. If it takes longer, it waits for
# the host.
GAP_S = 1e-5


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step and its four parts, in seconds."""

    step: int
    seconds: float
    compute_s: float
    exposed_s: float
    copies_s: float
    idle_s: float
    communication_s: float
    """All of it, also what compute hid."""


@dataclass(frozen=True, slots=True)
class Row:
    """Spans of one name and unit, for one step on average."""

    name: str
    unit: str
    calls: float
    seconds: float
    exposed_s: float
    """Exposed seconds of communication; nothing else can be exposed."""


@dataclass(frozen=True, slots=True)
class AxisTime:
    """What a step has moved along one axis of the mesh, on average."""

    axis: str
    calls: float
    num_bytes: float
    """Of whole tensors: the output of an all-gather, the input of any other collective."""

    seconds: float
    exposed_s: float
    planned_bytes: float
    planned_s: float
    """The time of the plan's links, one collective after the other."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which the device was idle."""

    step: int
    seconds: float
    before: str
    """What it had to wait for."""

    unit: str


@dataclass(frozen=True, slots=True)
class Profile:
    """The result of a trace."""

    rank: int
    world_size: int
    device: str
    steps: tuple[StepTime, ...]
    axes: tuple[AxisTime, ...]
    collectives: tuple[Row, ...]
    kernels: tuple[Row, ...]
    gaps: tuple[Gap, ...]
    """Longest first."""

    @property
    def step_s(self) -> float:
        """The mean time of a step."""
        return self.mean("seconds")

    def mean(self, part: str) -> float:
        """The mean of a part of the steps, such as `exposed_s`."""
        return sum(getattr(step, part) for step in self.steps) / len(self.steps)

    def share(self, part: str) -> float:
        """That mean as a share of the step."""
        return self.mean(part) / self.step_s

    def summary(self) -> dict[str, Any]:
        """The fields of the event that a run writes."""
        parts = ("compute", "exposed", "copies", "idle")
        return {
            "step": self.steps[-1].step,
            "steps": len(self.steps),
            "rank": self.rank,
            "step_s": self.step_s,
            **{f"{part}_share": self.share(f"{part}_s") for part in parts},
            "communication_s": self.mean("communication_s"),
            "axes": [asdict(axis) for axis in self.axes],
            "rows": [asdict(row) for row in fold(self.collectives, by=lambda row: row.name)],
            "gaps": len(self.gaps) / len(self.steps),
        }


class Cover:
    """The times at which at least one of some spans runs."""

    def __init__(self, spans: Iterable[Span]) -> None:
        merged: list[list[float]] = []
        for span in sorted(spans, key=lambda span: span.start):
            if merged and span.start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], span.end)
            else:
                merged.append([span.start, span.end])
        self.starts = [start for start, _ in merged]
        self.ends = [end for _, end in merged]
        self.sums = [0.0, *accumulate(end - start for start, end in merged)]

    def seconds(self, start: float, end: float) -> float:
        """How much of the time from `start` to `end` is covered."""
        first, last = bisect_right(self.ends, start), bisect_left(self.starts, end)
        if first >= last:
            return 0.0
        before = max(0.0, start - self.starts[first])
        after = max(0.0, self.ends[last - 1] - end)
        return self.sums[last] - self.sums[first] - before - after

    def holes(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """The times from `start` to `end` that are not covered."""
        at = start
        for index in range(bisect_right(self.ends, start), bisect_left(self.starts, end)):
            if self.starts[index] > at:
                yield at, self.starts[index]
            at = self.ends[index]
        if at < end:
            yield at, end


def profile_of(trace: Trace) -> Profile:
    """Judge every span of the trace that falls into a step."""
    computing = [span for span in trace.spans if span.what == "compute"]
    moving = [span for span in trace.spans if span.what == "communication"]
    compute, moved = Cover(computing), Cover(moving)
    useful, busy = Cover([*computing, *moving]), Cover(trace.spans)

    def split(window: StepSpan) -> StepTime:
        times = (window.start, window.end)
        covered = [cover.seconds(*times) for cover in (compute, useful, busy)]
        return StepTime(
            step=window.step,
            seconds=window.end - window.start,
            compute_s=covered[0],
            exposed_s=covered[1] - covered[0],
            copies_s=covered[2] - covered[1],
            idle_s=window.end - window.start - covered[2],
            communication_s=moved.seconds(*times),
        )

    gaps = [gap for window in trace.steps for gap in _gaps(trace.spans, busy, window)]
    return Profile(
        trace.rank,
        trace.world_size,
        trace.device,
        tuple(split(window) for window in trace.steps),
        tuple(_axes(trace, moving, compute)),
        tuple(_rows(moving, trace.steps, compute)),
        tuple(_rows(computing, trace.steps, compute)),
        tuple(sorted(gaps, key=lambda gap: -gap.seconds)),
    )


def fold(rows: Iterable[Row], *, by: Callable[[Row], object]) -> list[Row]:
    """Merge rows that are alike by `by`, most time first. A unit is left out where the merged
    rows differ in it."""
    groups: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        groups[by(row)].append(row)
    folded = [
        Row(
            _common([row.name for row in members]),
            _common([row.unit for row in members]),
            sum(row.calls for row in members),
            sum(row.seconds for row in members),
            sum(row.exposed_s for row in members),
        )
        for members in groups.values()
    ]
    return sorted(folded, key=lambda row: -row.seconds)


def _common(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else NO_UNIT


def _rows(spans: Sequence[Span], steps: Sequence[StepSpan], compute: Cover) -> Iterator[Row]:
    """Rows by name and unit, averaged over steps. A span that leaves its step counts with the
    part inside."""
    calls: dict[tuple[str, str], int] = defaultdict(int)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for window in steps:
        for span in spans:
            start, end = max(span.start, window.start), min(span.end, window.end)
            if start >= end:
                continue
            key = span.name, span.unit
            calls[key] += span.start >= window.start
            seconds[key][0] += end - start
            seconds[key][1] += end - start - compute.seconds(start, end)
    count = len(steps)
    for (name, unit), (ran, exposed) in seconds.items():
        yield Row(name, unit, calls[name, unit] / count, ran / count, exposed / count)


def _axes(trace: Trace, moving: Sequence[Span], compute: Cover) -> Iterator[AxisTime]:
    """Calls and bytes as the host has counted them, and the seconds of what they began."""
    along = [replace(span, name=span.axis, unit=NO_UNIT) for span in moving if span.axis]
    times = {row.name: row for row in _rows(along, trace.steps, compute)}
    count = len(trace.steps)
    seen = {each.axis for each in trace.moved}
    for axis in (axis for axis in AXES if axis in seen):
        planned = trace.planned.get(axis, AxisTraffic(0.0, 0.0))
        calls = [each.num_bytes for each in trace.moved if each.axis == axis]
        seconds = (times[axis].seconds, times[axis].exposed_s) if axis in times else (0.0, 0.0)
        numbers = (len(calls) / count, sum(calls) / count, *seconds)
        yield AxisTime(axis, *numbers, planned.num_bytes, planned.seconds)


def _gaps(spans: Sequence[Span], busy: Cover, window: StepSpan) -> Iterator[Gap]:
    starts = [span.start for span in spans]
    for start, end in busy.holes(window.start, window.end):
        if end - start < GAP_S:
            continue
        after = bisect_left(starts, end)
        if end < window.end and after < len(spans):
            yield Gap(window.step, end - start, spans[after].name, spans[after].unit)
        else:
            yield Gap(window.step, end - start, "the end of the step", NO_UNIT)
