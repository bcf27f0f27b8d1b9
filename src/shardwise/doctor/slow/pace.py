"""How fast a run was beside its plan, and where its time went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from shardwise.doctor.run.case import Case, Event
from shardwise.facts.collective_cost import Collective, bus_rate
from shardwise.metrics.goodput import goodput
from shardwise.plan.planned import Plan
from shardwise.plan.rank_share import num_shards

# What a step computes, of the terms of a forecast.
_COMPUTE = ("matmul", "attention", "elementwise", "loss", "recompute", "optimizer")
_COPIES = ("copies", "offload")
_IDLE = ("launch", "other", "bubble")
# Smaller messages show latency rather than the links.
_LEAST_BYTES = 2**20
_SHORT_S = 600


@dataclass(frozen=True)  # no slots: they leave no room for cached properties
class Pace:
    """The time of a run, measured and planned. Needs at least one steady step."""

    case: Case
    plan: Plan

    @cached_property
    def step_s(self) -> float:
        """The usual step."""
        return statistics.median(event["step_s"] for event in self.case.steady)

    @cached_property
    def planned_s(self) -> float | None:
        """The step of the plan, for as many tokens."""
        return None if self.plan.forecast is None else self.plan.forecast.step_s

    @cached_property
    def slower(self) -> float:
        """The share of a step above the plan's; 0 where the plan is met or has no forecast."""
        return 0.0 if self.planned_s is None else max(0.0, 1 - self.planned_s / self.step_s)

    @cached_property
    def spent(self) -> dict[str, float]:
        """Shares of the whole time by kind, as goodput counts them. Of a short run the start takes
        most, and nothing follows from that."""
        spent = goodput(self.case.whole)
        total = sum(spent.values())
        if total < _SHORT_S:
            return {kind: float(kind == "productive") for kind in spent}
        return {kind: seconds / total for kind, seconds in spent.items()}

    @cached_property
    def profile(self) -> Event | None:
        """The newest profiled steps, with all four parts."""
        parts = ("step_s", "compute_share", "exposed_share", "copies_share", "idle_share")
        for event in reversed(self.case.of_kind("profile")):
            if all(isinstance(event.get(part), int | float) for part in parts):
                return event
        return None

    def planned_share(self, *terms: str) -> float:
        """Terms of the forecast, as a share of the measured step."""
        forecast = self.plan.forecast
        if forecast is None:
            return 0.0
        return sum(forecast.terms.get(term, 0.0) for term in terms) / self.step_s

    def excess(self, part: str) -> float | None:
        """By how much a part of the profiled steps is above the plan, as a share of a step; None
        where nothing was profiled or planned."""
        if self.profile is None or self.plan.forecast is None:
            return None
        terms = {"compute": _COMPUTE, "copies": _COPIES, "idle": _IDLE}
        planned = self.planned_share(*terms.get(part, ("exposed", "waiting")))
        return float(self.profile[f"{part}_share"]) - planned

    @cached_property
    def late(self) -> tuple[int, float] | None:
        """The rank that the others wait for most, and the share of all steps that they do."""
        reports = self.case.of_kind("collectives")
        waits: dict[int, float] = {}
        for event in reports:
            if event["straggler"] is not None:
                rank = event["straggler"]["rank"]
                waits[rank] = waits.get(rank, 0.0) + event["straggler"]["behind_s"]
        if not waits:
            return None
        rank = max(waits, key=lambda each: waits[each])
        return rank, waits[rank] / len(reports) / self.step_s

    @cached_property
    def link_share(self) -> tuple[float, str] | None:
        """The bandwidth of large collectives as a share of what the links should carry, and which
        ones; None where none was timed."""
        found: dict[str, list[float]] = {}
        for event in self.case.of_kind("collectives"):
            for row in _rows(event):
                share = self._of_expected(row)
                if share is not None:
                    found.setdefault(str(row["kind"]), []).append(share)
        if not found:
            return None
        middle = {kind: statistics.median(shares) for kind, shares in found.items()}
        worst = min(middle, key=lambda kind: middle[kind])
        return middle[worst], worst

    @cached_property
    def communication_share(self) -> float:
        """The time of collectives as a share of steps, hidden or not."""
        reports = self.case.of_kind("collectives")
        shares = [
            sum(row["count"] * row["p50_s"] for row in _rows(event))
            / max(1, event["step"] - before["step"])
            / self.step_s
            for before, event in pairwise(reports)
        ]
        return min(1.0, statistics.median(shares)) if shares else 0.0

    def _of_expected(self, row: Event) -> float | None:
        kinds: dict[str, Collective] = {
            "all_gather": "all_gather",
            "reduce_scatter": "reduce_scatter",
            "all_reduce": "all_reduce",
        }
        kind, count = kinds.get(str(row["kind"])), row["count"]
        if kind is None or not count or row["bytes"] / count < _LEAST_BYTES:
            return None
        decided = self.plan.decided
        replicates = kind == "all_reduce"
        ranks = decided.replicate if replicates else num_shards(decided)
        stride = num_shards(decided) * decided.tensor if replicates else decided.tensor
        if ranks < 2:
            return None
        size = row["bytes"] / count
        fabric = self.plan.cluster.fabric
        spans_domains = replicates or ranks * stride > fabric.domain
        if fabric.library == "gloo" and not spans_domains:
            # Ranks on one CPU hold each other up: their collectives tell nothing of links.
            return None
        seconds = fabric.seconds(kind, size, ranks, stride)
        return float(row["bus_bytes_per_s"]) / bus_rate(kind, size, ranks, seconds)

    @cached_property
    def drift(self) -> float:
        """By how much the last quarter of steps is slower than the first."""
        times = [event["step_s"] for event in self.case.steady]
        quarter = len(times) // 4
        if quarter < 2:
            return 0.0
        return statistics.median(times[-quarter:]) / statistics.median(times[:quarter]) - 1


def _rows(event: Event) -> Sequence[dict[str, Any]]:
    numbers = ("count", "bytes", "bus_bytes_per_s", "p50_s")
    rows = event.get("rows")
    return [
        row
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
        and "kind" in row
        and all(isinstance(row.get(name), int | float) for name in numbers)
    ]


def pace_of(case: Case) -> Pace | None:
    """The pace of a run; None where it has no plan or too few steps, or where these took no
    time."""
    plan = case.run.plan
    if plan is None or len(case.steady) < 2:
        return None
    pace = Pace(case, plan)
    return pace if pace.step_s > 0 else None
