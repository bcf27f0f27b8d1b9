"""The result of a run in the tunnel, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.plan.axis_traffic import AxisTraffic, planned_traffic, traffic_to_dict
from shardwise.plan.planned import Plan
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.traffic import Collective, sum_by_axis, sum_traffic

Mode = Literal["gpu", "cpu", "fake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Measured medians over the steps of a pass."""

    num_steps: int
    step_s: float
    free_step_s: float
    """The same step over links of infinite speed."""

    emulated_s: float
    """The time that the collectives of a step took, one after the other. The model expects
    `communication_s`. Where this is more, local copies were slower than the modelled link."""

    tokens_per_s_per_gpu: float
    mfu: float | None
    hfu: float | None

    @property
    def exposed_s(self) -> float:
        """Communication that compute did not hide."""
        return max(0.0, self.step_s - self.free_step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of rank 0 at the peak of a step."""

    allocated_bytes: int
    reserved_bytes: int | None
    """What the caching allocator held; None where there is none."""

    classes: dict[str, int]
    """What the peak is made of, as far as that is known."""

    largest: dict[str, int]
    """The most of each class, each at its own time."""

    moment: str | None = None
    """When in the step the peak is, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelResult:
    """Rank 0 of a run, as measured on this machine."""

    plan: Plan
    mode: Mode
    device_name: str
    links: Links
    memory: Memory
    timing: Timing | None
    """Measured times; None on fake tensors, where nothing takes time."""

    collectives: list[Collective]
    """The collectives of one step, in order."""

    notes: list[str]
    """Where this differs from the run itself."""

    trace: Path | None = None
    """Where steps under the profiler were written to."""

    @property
    def communication_s(self) -> float:
        """Modelled time of a step's collectives, one after the other."""
        return sum(item.seconds for item in self.collectives)

    @property
    def axes(self) -> dict[str, AxisTraffic]:
        """What a step moves along each axis, and the modelled time of that."""
        return sum_by_axis(self.collectives)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for scripts. Keys do not change from release to release."""
        plan, timing = self.plan, self.timing
        return {
            "model": plan.model.name,
            "cluster": plan.cluster.name,
            "world_size": plan.world_size,
            "strategy": plan.decided.strategy,
            "replicate": plan.decided.replicate,
            "shard": plan.decided.shard,
            "mode": self.mode,
            "device": self.device_name,
            # JSON has no infinity.
            "link_speed": None if self.links.are_free else self.links.speed,
            "links": self.links.fabric.to_dict(),
            "steps": timing.num_steps if timing else 1,
            "step_s": timing.step_s if timing else None,
            "free_step_s": timing.free_step_s if timing else None,
            "exposed_s": timing.exposed_s if timing else None,
            "communication_s": self.communication_s,
            "emulated_s": timing.emulated_s if timing else None,
            "tokens_per_s_per_gpu": timing.tokens_per_s_per_gpu if timing else None,
            "mfu": timing.mfu if timing else None,
            "hfu": timing.hfu if timing else None,
            "peak_allocated_bytes": self.memory.allocated_bytes,
            "peak_reserved_bytes": self.memory.reserved_bytes,
            "peak_moment": self.memory.moment,
            "memory": self.memory.classes,
            "largest_memory": self.memory.largest,
            "planned_memory": asdict(plan.memory) | {"total": plan.memory.total},
            "axes": traffic_to_dict(self.axes, planned_traffic(plan)),
            "collectives": [asdict(row) for row in sum_traffic(self.collectives)],
            "sequence": [asdict(item) for item in self.collectives],
            "notes": self.notes,
            "trace": None if self.trace is None else str(self.trace),
        }
