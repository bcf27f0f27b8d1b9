"""How long the collectives of every unit take, and how long a rank waits in every step.

FSDP2's public hooks let us call a unit's all-gather and reduce-scatter. We call the same collective
between two timestamps, which are read later, so no step waits for them. A hook after the all-reduce
over replicas gives its end; it began when the unit's reduce-scatter ended.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.facts.collective_cost import Collective, ring_load
from shardwise.metrics.straggler import JUDGED_STEPS, find_straggler
from shardwise.parallel.comm import Carrier
from shardwise.parallel.mesh import World

# Upper bounds of the histogram, in seconds: from a fast unit inside a node to a hang.
BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
# Two parts of a run: the one in which ranks only meet, and the one that belongs to no step.
AGREE, EVAL = "agree", "eval"


class Stamp(Protocol):
    """A moment on the device."""

    def seconds_until(self, later: Any) -> float:
        """Seconds from this moment to a later one."""


class HostStamp:
    """A moment on the host; gloo's collectives have ended when they return."""

    def __init__(self) -> None:
        self.moment = time.perf_counter()

    def seconds_until(self, later: HostStamp) -> float:
        """The seconds to a later moment; both have passed already."""
        return later.moment - self.moment


class CudaStamp:
    """A moment on the current stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_until(self, later: CudaStamp) -> float:
        """The seconds to a later moment, which is waited for. It is called at a logged step,
        when the device has caught up."""
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1e3


Span = tuple[Stamp, Stamp]


@dataclass(frozen=True, slots=True)
class Sample:
    """One collective whose time has not been read yet."""

    kind: Collective
    phase: str
    unit: str
    num_bytes: int
    ranks: int
    started: Stamp
    ended: Stamp


@dataclass(slots=True)
class CollectiveTimer(Carrier):
    """Times every collective of a model."""

    device: torch.device
    world: World
    phase: str = "forward"
    samples: list[Sample] = field(default_factory=list)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    entered: Stamp | None = None
    """When the current part of the step began, if ranks only wait in it."""

    spans: deque[list[Span]] = field(default_factory=lambda: deque([[]], maxlen=JUDGED_STEPS + 1))
    """The waits of each step since the last report. The last entry is the current step's."""

    waits: deque[float] = field(default_factory=lambda: deque(maxlen=JUDGED_STEPS))
    """Seconds that this rank waited in each of the last steps that were reported."""

    late_rank: int | None = None
    """The rank that the last report named."""

    scattered: dict[str, Stamp] = field(default_factory=dict)
    """When the last reduce-scatter of each unit ended: its all-reduce began then."""

    def stamp(self) -> Stamp:
        """Now, on the device."""
        return CudaStamp() if self.device.type == "cuda" else HostStamp()

    def forget(self) -> None:
        """Drop what was timed so far: trial passes before the first step belong to no step."""
        self.samples, self.scattered = [], {}
        self.spans.clear()
        self.spans.append([])

    def enter(self, phase: str) -> None:
        """Begin a part of the step: `agree`, `forward`, `backward` or `eval`."""
        if self.entered is not None:
            self.spans[-1].append((self.entered, self.stamp()))
        self.entered = self.stamp() if phase == AGREE else None
        self.phase = phase

    def end_step(self) -> None:
        """End the step. What follows belongs to the next one."""
        self.enter("other")
        self.spans.append([])

    def note(
        self, kind: Collective, unit: str, num_bytes: int, group: dist.ProcessGroup, started: Stamp
    ) -> None:
        """Note that the collective which was just called began at `started`."""
        ended, size = self.stamp(), group.size()
        self.samples.append(Sample(kind, self.phase, unit, num_bytes, size, started, ended))
        if self.phase != EVAL:
            self.spans[-1].append((started, ended))

    def all_gather(
        self,
        unit: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """The plain all-gather between two timestamps."""
        started = self.stamp()
        work = Carrier.all_gather(self, unit, outputs, inputs, group, async_op)
        self.note("all_gather", unit, sum(each.nbytes for each in outputs), group, started)
        return work

    def reduce_scatter(
        self,
        unit: str,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """The plain reduce-scatter between two timestamps."""
        started = self.stamp()
        work = Carrier.reduce_scatter(self, unit, output_tensor, input_tensor, group, op, async_op)
        self.note("reduce_scatter", unit, input_tensor.nbytes, group, started)
        self.scattered[unit] = self.samples[-1].ended
        return work

    def all_reduced(self, unit: str, group: dist.ProcessGroup, gradients: Tensor) -> None:
        """Note the end of an all-reduce. Where no reduce-scatter precedes it, its start is
        unknown and it is left out."""
        if unit in self.scattered:
            self.note("all_reduce", unit, gradients.nbytes, group, self.scattered[unit])

    def report(self, step_s: float) -> dict[str, Any] | None:
        """The samples since the last report as an event; all ranks call it at the same step."""
        timed = [(each, each.started.seconds_until(each.ended)) for each in self.samples]
        self.samples = []
        for sample, seconds in timed:
            self.histograms.setdefault(sample.kind, Histogram()).add(seconds)
        while len(self.spans) > 1:
            spans = self.spans.popleft()
            self.waits.append(sum(began.seconds_until(ended) for began, ended in spans))
        straggler = find_straggler(
            list(self.waits), step_s, self.device.type, self.late_rank, self.world
        )
        self.late_rank = None if straggler is None else straggler["rank"]
        if not timed:
            return None
        return {
            "rows": summarise(timed),
            "straggler": straggler,
            "seconds": {kind: found.to_dict() for kind, found in self.histograms.items()},
        }


@dataclass(slots=True)
class Histogram:
    """Counts by duration over the whole run, in the form that Prometheus keeps."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[sum(bound < seconds for bound in BOUNDS)] += 1
        self.total += seconds

    def to_dict(self) -> dict[str, Any]:
        """Cumulative counts by upper bound, their sum and number."""
        running, buckets = 0, []
        for bound, count in zip(BOUNDS, self.counts, strict=False):
            running += count
            buckets.append([bound, running])
        return {"buckets": buckets, "sum": self.total, "count": sum(self.counts)}


def summarise(timed: Sequence[tuple[Sample, float]]) -> list[dict[str, Any]]:
    """One row for each kind and phase: how many, how long, how fast."""
    groups: dict[tuple[str, str], list[tuple[Sample, float]]] = defaultdict(list)
    for sample, seconds in timed:
        groups[sample.kind, sample.phase].append((sample, seconds))
    return [
        {
            "kind": kind,
            "phase": phase,
            "count": len(members),
            "p50_s": statistics.median(seconds for _, seconds in members),
            "p99_s": _quantile([seconds for _, seconds in members], 0.99),
            "bytes": sum(sample.num_bytes for sample, _ in members),
            "bus_bytes_per_s": _bus_rate(members),
            "slowest_unit": max(members, key=lambda member: member[1])[0].unit,
        }
        for (kind, phase), members in sorted(groups.items())
    ]


def _bus_rate(members: Sequence[tuple[Sample, float]]) -> float:
    """Bus bandwidth as nccl-tests define it: the bytes that each rank of a ring passed on, per
    second."""
    moved = sum(ring_load("nccl", each.kind, each.num_bytes, each.ranks)[1] for each, _ in members)
    return moved / max(1e-9, sum(seconds for _, seconds in members))


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
