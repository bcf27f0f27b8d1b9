"""How long the collectives of every unit take, and which rank the others wait for.

FSDP2's public hooks let a unit's all-gather and reduce-scatter be called by us: the same collective
between two time stamps, which are read later, so that no step waits for them. A hook after the
all-reduce over replicas gives its end; it began when the unit's reduce-scatter ended. What a rank
spends in a collective includes its wait for the others: the rank that waits least is the one that
comes last.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwise.model.blocks import UnitMap, iter_modules

# Upper bounds of the histogram, in seconds: from a fast unit inside a node to a hang.
BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
# A rank is named when the others wait this much longer than it, as a share of the step, in two
# reports one after the other: a pause that happens once is nobody's fault.
BEHIND_SHARE = 0.10
BEHIND_S = 0.005


class Stamp(Protocol):
    """A moment on the device."""

    def seconds_until(self, later: Any) -> float:
        """Seconds from this moment to a later one."""


class HostStamp:
    """A moment on the host; gloo's collectives have ended when they return."""

    def __init__(self) -> None:
        self.moment = time.perf_counter()

    def seconds_until(self, later: HostStamp) -> float:
        """Both have passed already."""
        return later.moment - self.moment


class CudaStamp:
    """A moment on the current stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_until(self, later: CudaStamp) -> float:
        """Waits for the later moment; asked for at a logged step, when the device has caught up."""
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1e3


@dataclass(frozen=True, slots=True)
class Sample:
    """One collective, its time not yet read."""

    kind: str
    phase: str
    unit: str
    num_bytes: int
    ranks: int
    started: Stamp
    ended: Stamp


@dataclass(slots=True)
class CollectiveTimer:
    """Takes the time of every collective of a model."""

    device: torch.device
    phase: str = "forward"
    samples: list[Sample] = field(default_factory=list)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    suspect: int | None = None
    """The rank that came last in the report before."""

    scattered: dict[str, Stamp] = field(default_factory=dict)
    """When the last reduce-scatter of each unit ended: its all-reduce began then."""

    def stamp(self) -> Stamp:
        """Now, on the device."""
        return CudaStamp() if self.device.type == "cuda" else HostStamp()

    def enter(self, phase: str) -> None:
        """What follows belongs to `forward` or `backward`."""
        self.phase = phase

    def note(
        self, kind: str, unit: str, tensor: Tensor, group: dist.ProcessGroup, started: Stamp
    ) -> None:
        """A collective that was called just now has begun at `started`."""
        ended, size = self.stamp(), group.size()
        self.samples.append(Sample(kind, self.phase, unit, tensor.nbytes, size, started, ended))

    def report(self, steps: int, step_s: float) -> dict[str, Any] | None:
        """The samples since the last report as an event; all ranks call it at the same step."""
        timed = [(each, each.started.seconds_until(each.ended)) for each in self.samples]
        self.samples = []
        for sample, seconds in timed:
            self.histograms.setdefault(sample.kind, Histogram()).add(seconds)
        late = find_straggler(sum(s for _, s in timed) / max(1, steps), step_s)
        straggler = late if late is not None and late["rank"] == self.suspect else None
        self.suspect = None if late is None else late["rank"]
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
        """One more."""
        self.counts[sum(bound < seconds for bound in BOUNDS)] += 1
        self.total += seconds

    def to_dict(self) -> dict[str, Any]:
        """Cumulative counts by upper bound, their sum and number."""
        running, buckets = 0, []
        for bound, count in zip(BOUNDS, self.counts, strict=False):
            running += count
            buckets.append([bound, running])
        return {"buckets": buckets, "sum": self.total, "count": sum(self.counts)}


def time_collectives(
    model: nn.Module, units: UnitMap, mesh: DeviceMesh, timer: CollectiveTimer
) -> None:
    """Have the collectives of every unit, and of the root, go through `timer`."""
    replicas = mesh.get_group("replicate") if mesh.ndim > 1 and mesh.size(1) > 1 else None
    named = {unit.name: next(iter_modules(model, unit)) for unit in units.units}
    for name, module in {**named, "root": model}.items():
        if not isinstance(module, FSDPModule):
            continue
        # The protocol of both is public, the classes that spell it out are not.
        module.set_custom_all_gather(cast(Any, _TimedAllGather(timer, name)))
        module.set_custom_reduce_scatter(cast(Any, _TimedReduceScatter(timer, name)))
        if replicas is not None:
            module.set_all_reduce_hook(partial(_note_all_reduce, timer, name, replicas))


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


def find_straggler(waited_s: float, step_s: float) -> dict[str, Any] | None:
    """The rank that the others wait for in every step, if one stands out; a collective call."""
    mine = torch.tensor([waited_s], dtype=torch.float64)
    waits = torch.empty(dist.get_world_size(), dtype=torch.float64)
    dist.all_gather_into_tensor(waits, mine)
    return judge_waits(waits.tolist(), step_s)


def judge_waits(waits: Sequence[float], step_s: float) -> dict[str, Any] | None:
    """From what each rank waits in a step: the one that waits least, if by far."""
    if len(waits) == 1:
        return None
    last = min(range(len(waits)), key=lambda rank: waits[rank])
    others = [wait for rank, wait in enumerate(waits) if rank != last]
    behind = statistics.median(others) - waits[last]
    if behind < max(BEHIND_S, BEHIND_SHARE * step_s):
        return None
    return {"rank": last, "behind_s": behind}


@dataclass(frozen=True, slots=True)
class _Timed:
    """FSDP2's `Comm`: it asks for the memory of a collective, and then calls it."""

    timer: CollectiveTimer
    unit: str

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As FSDP2 does itself."""
        return torch.empty(*size, dtype=dtype, device=device)

    def run(
        self, kind: str, whole: Tensor, group: dist.ProcessGroup, call: Callable[[], Any]
    ) -> Any:
        """Call it between two stamps."""
        started = self.timer.stamp()
        work = call()
        self.timer.note(kind, self.unit, whole, group, started)
        return work


class _TimedAllGather(_Timed):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        gather = partial(dist.all_gather_into_tensor, output_tensor, input_tensor, group, async_op)
        return self.run("all_gather", output_tensor, group, gather)


class _TimedReduceScatter(_Timed):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        scatter = partial(
            dist.reduce_scatter_tensor, output_tensor, input_tensor, op, group, async_op
        )
        work = self.run("reduce_scatter", input_tensor, group, scatter)
        self.timer.scattered[self.unit] = self.timer.samples[-1].ended
        return work


def _note_all_reduce(
    timer: CollectiveTimer, unit: str, replicas: dist.ProcessGroup, gradients: Tensor
) -> None:
    """FSDP2 calls it right after its own all-reduce over the replicas."""
    timer.note("all_reduce", unit, gradients, replicas, timer.scattered[unit])


def _bus_rate(members: Sequence[tuple[Sample, float]]) -> float:
    """Bytes that crossed a link of the ring, per second, over all members."""
    moved = sum(each.num_bytes * (each.ranks - 1) / each.ranks for each, _ in members)
    return moved / max(1e-9, sum(seconds for _, seconds in members))


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
