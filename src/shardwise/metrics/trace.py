"""A Kineto trace as spans of time, each with the unit that it belongs to.

On a GPU a span is a kernel or a copy, and belongs to the unit that launched it. On a CPU it is an
operator of the training thread, or a collective of gloo's threads. A unit's forward carries our own
label. A backward node carries the sequence number of the forward operator that made it, which holds
through recompute and compiled blocks. FSDP2 labels its own work with the modules of the unit. The
tunnel labels its emulated collectives: everything inside such a label is one of them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.internals.private_names import COLLECTIVE_PREFIXES, TRACED_CALLS
from shardwise.metrics.labels import ALONG, PLAYED, STEP, UNIT, AxisCall, call_in
from shardwise.plan.axis_traffic import AxisTraffic

What = Literal["compute", "communication", "copy"]
Event = Mapping[str, Any]
Played = tuple[str, int]
"""The kind of an emulated collective, and its number in the trace."""

METADATA = "shardwise"
"""The key of a trace under which the run says what the trace itself does not."""

NO_UNIT = "-"
OPTIMIZER = "optimizer"
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_COPIES = ("gpu_memcpy", "gpu_memset")
_MICRO = 1e-6
_FSDP_LABEL = re.compile(r"FSDP::\w+ \((.+)\)$")
_KINDS = re.compile(r"AllGather|ReduceScatter|AllReduce|AllToAll|Broadcast|SendRecv")
# On a CPU an operator over sharded tensors contains these, and then the actual operators.
_HAND_ON = ("PythonSubclass", *COLLECTIVE_PREFIXES)


@dataclass(frozen=True, slots=True)
class Span:
    """An activity from `start` to `end`, in seconds of the trace's clock."""

    what: What
    name: str
    """The kernel or operator; of communication its kind, such as `all_gather`."""

    unit: str
    start: float
    end: float
    axis: str = ""
    """Of communication the axis that it goes along, where that is one."""


@dataclass(frozen=True, slots=True)
class StepSpan:
    """The time of one step."""

    step: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Several steps of one rank."""

    rank: int
    world_size: int
    device: str
    steps: tuple[StepSpan, ...]
    spans: tuple[Span, ...]
    """Spans in the order of their starts."""

    moved: tuple[AxisCall, ...]
    """What was moved along axes in these steps."""

    planned: Mapping[str, AxisTraffic]
    """What the plan has of one step along each axis."""


def parse_trace(data: Mapping[str, Any]) -> Trace:
    """The spans of Kineto's JSON."""
    about = data[METADATA]
    events = [event for event in data["traceEvents"] if event.get("ph") == "X"]
    host = _HostSweep({frozenset(names): unit for unit, names in about["units"].items()})
    host.sweep(event for event in events if event.get("cat") in _HOST)
    if not host.steps:
        raise ValueError("no step is labelled in it")
    steps, spans = host.steps, host.spans
    begin, end = steps[0].start, steps[-1].end
    moved = tuple(each for each in host.moved if begin <= each.moment < end)
    if about["device"] == "cuda":
        on_device = [event for event in events if event.get("cat") in ("kernel", *_COPIES)]
        steps = list(_device_windows(steps, on_device, host.launches))
        spans = list(_device_spans(on_device, host.launches))
    spans.sort(key=lambda span: span.start)
    about_rank = (about["rank"], about["world_size"], about["device"])
    planned = {axis: AxisTraffic(**sums) for axis, sums in about.get("planned", {}).items()}
    return Trace(*about_rank, tuple(steps), tuple(spans), moved, planned)


def _device_windows(
    steps: list[StepSpan], on_device: Iterable[Event], launches: Mapping[int, Launch]
) -> Iterator[StepSpan]:
    """The steps by the device's clock.

    The host runs ahead of the device. A step lasts until the device has done the step's work, and
    the next one begins there.
    """
    until = {step.step: step.end for step in steps[-1:]}
    starts = [step.start for step in steps]
    for event in on_device:
        launch = _launch_of(event, launches)
        place = bisect_right(starts, launch.moment) - 1
        if place >= 0:
            number = steps[place].step
            until[number] = max(until.get(number, 0.0), _times(event)[1])
    start = steps[0].start
    for step in steps:
        end = until.get(step.step, step.end)
        yield StepSpan(step.step, start, end)
        start = end


def _device_spans(on_device: Iterable[Event], launches: Mapping[int, Launch]) -> Iterator[Span]:
    """The spans on the device. The copies and waits of an emulated collective are one span."""
    played: dict[Played, list[Span]] = defaultdict(list)
    for event in on_device:
        span, within = _device_span(event, launches), _launch_of(event, launches).played
        if within is None:
            yield span
        else:
            played[within].append(span)
    for (kind, _), parts in played.items():
        start, end = min(part.start for part in parts), max(part.end for part in parts)
        yield Span("communication", kind, parts[0].unit, start, end, parts[0].axis)


def _device_span(event: Event, launches: Mapping[int, Launch]) -> Span:
    kind = _kind_of_kernel(event["name"])
    is_copy = event["cat"] in _COPIES
    what: What = "copy" if is_copy else "communication" if kind else "compute"
    launch = _launch_of(event, launches)
    return Span(what, kind or event["name"], launch.unit, *_times(event), launch.axis)


def _launch_of(event: Event, launches: Mapping[int, Launch]) -> Launch:
    """The launch of an event, or nothing where it was launched before the trace began."""
    return launches.get(event["args"].get("correlation"), Launch(NO_UNIT, float("-inf")))


def _kind_of_kernel(name: str) -> str | None:
    """`ncclDevKernel_AllGather_RING_LL(...)` is an all_gather; None for what is no collective."""
    if not name.startswith("nccl"):
        return None
    found = _KINDS.search(name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found[0]).lower() if found else "collective"


def _times(event: Event) -> tuple[float, float]:
    start = _MICRO * event["ts"]
    return start, start + _MICRO * event["dur"]


@dataclass(frozen=True, slots=True)
class Launch:
    """When the host told the device to do something, and for which unit."""

    unit: str
    moment: float
    played: Played | None = None
    axis: str = ""


@dataclass(slots=True)
class _Frame:
    """A host event in progress on its thread, and what is known inside it."""

    end: float
    unit: str = NO_UNIT
    is_backward: bool = False
    operator: int | None = None
    """The place among the spans of the operator that it is part of."""

    played: Played | None = None
    """The emulated collective that it is part of."""

    axis: str = ""
    """The axis of the collective that it is part of."""


_OUTSIDE = _Frame(float("inf"))


@dataclass(slots=True)
class _HostSweep:
    """Goes through the host's events in time, and notes for which unit each was."""

    units: Mapping[frozenset[str], str]
    """Units by the modules that they hold."""

    steps: list[StepSpan] = field(default_factory=list)
    noted: list[Span | None] = field(default_factory=list)
    launches: dict[int, Launch] = field(default_factory=dict)
    """Launches by correlation id."""

    thread: object = None
    """The thread that trains."""

    call: tuple[str, str, str] = ("", NO_UNIT, "")
    """Kind, unit and axis of the collective that was called last."""

    moved: list[AxisCall] = field(default_factory=list)

    made_by: dict[int, str] = field(default_factory=dict)
    """Sequence number of a forward operator -> its unit."""

    num_played: int = 0

    @property
    def spans(self) -> list[Span]:
        """The spans on a CPU."""
        return [span for span in self.noted if span is not None]

    def sweep(self, events: Iterable[Event]) -> None:
        """Assign events. An event that begins inside another of its thread belongs to that one."""
        stacks: dict[object, list[_Frame]] = defaultdict(list)
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            start, end = _times(event)
            stack = stacks[event["tid"]]
            while stack and stack[-1].end <= start:
                stack.pop()
            frame = self._enter(event, stack[-1] if stack else _OUTSIDE, end)
            self._note(event, frame, start, end)
            stack.append(frame)

    def _enter(self, event: Event, outer: _Frame, end: float) -> _Frame:
        """What holds inside `event`: its own unit where it has one, else the outer one."""
        name, args = event["name"], event.get("args", {})
        outside = (outer.unit, outer.is_backward, outer.operator, outer.played, outer.axis)
        frame = _Frame(end, *outside)
        number = args.get("Sequence number")
        if event["cat"] == "user_annotation":
            frame.unit = self._unit_of_label(name) or outer.unit
            if name.startswith(PLAYED):
                self.num_played += 1
                frame.played = name.removeprefix(PLAYED), self.num_played
            elif name.startswith(ALONG):
                frame.axis = call_in(name, _MICRO * event["ts"]).axis
        elif number is not None and args.get("Fwd thread id"):
            frame.unit, frame.is_backward = self.made_by.get(number, outer.unit), True
        elif number is not None and not outer.is_backward:
            # The operator that takes a sequence number is the last one to show it.
            self.made_by[number] = outer.unit
        return frame

    def _unit_of_label(self, name: str) -> str | None:
        if name.startswith(UNIT):
            return name.removeprefix(UNIT)
        if name.startswith("Optimizer.step#"):
            return OPTIMIZER
        found = _FSDP_LABEL.match(name)
        return self.units.get(frozenset(found[1].split(", "))) if found else None

    def _note(self, event: Event, frame: _Frame, start: float, end: float) -> None:
        name, category = event["name"], event["cat"]
        if category in ("cuda_runtime", "cuda_driver"):
            launch = Launch(frame.unit, start, frame.played, frame.axis)
            self.launches[event["args"].get("correlation", -1)] = launch
        elif category == "user_annotation" and name.startswith(STEP):
            self.thread = event["tid"]
            self.steps.append(StepSpan(int(name.removeprefix(STEP)), start, end))
        elif category == "user_annotation" and name.startswith(PLAYED):
            kind = name.removeprefix(PLAYED)
            self.noted.append(Span("communication", kind, frame.unit, start, end, frame.axis))
        elif category == "user_annotation" and name.startswith(ALONG):
            self.moved.append(call_in(name, start))
        elif name.startswith("gloo:"):
            kind, unit, axis = self.call
            self.noted.append(Span("communication", kind or name[5:], unit, start, end, axis))
        elif event["tid"] == self.thread and frame.played is None:
            self._note_operator(name, frame, start, end)

    def _note_operator(self, name: str, frame: _Frame, start: float, end: float) -> None:
        """Note an operator. It computes as a whole, unless it calls others or waits for them."""
        if name.startswith("c10d::"):
            # Others keep their own names.
            call = TRACED_CALLS.get(name, name.removeprefix("c10d::").strip("_"))
            self.call = call, frame.unit, frame.axis
        if name.startswith(_HAND_ON) and frame.operator is not None:
            self.noted[frame.operator], frame.operator = None, None
        elif _computes(name) and frame.operator is None:
            frame.operator = len(self.noted)
            self.noted.append(Span("compute", name, frame.unit, start, end))


def _computes(name: str) -> bool:
    """Whether this computes on a CPU: an operator, or a compiled graph, whose kernels are no
    operators."""
    return name.startswith(("aten::", "## Call CompiledFxGraph"))
