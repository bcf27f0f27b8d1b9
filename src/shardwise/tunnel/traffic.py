"""The communication of a step: every collective in order, and their sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.facts.collective_cost import Collective as Kind
from shardwise.parallel.axis_groups import AxisGroups
from shardwise.plan.axis_traffic import AXES, AxisTraffic


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one step."""

    kind: Kind
    num_bytes: int
    """Bytes of the whole tensor: the output of an all-gather, the input of the others."""

    ranks: int
    stride: int
    seconds: float
    """The time on the modelled links."""

    axis: str
    """The axis that it moves along; empty for what ranks of several axes agree on."""

    unit: str
    """The unit whose parameters or gradients it moves; empty for what blocks exchange, and for the
    few numbers that ranks agree on."""


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """All collectives of one kind along one axis, in groups of one shape."""

    kind: Kind
    axis: str
    ranks: int
    stride: int
    count: int
    num_bytes: int
    seconds: float


@dataclass(slots=True)
class Traffic:
    """The collectives of one step in the order in which they were issued."""

    items: list[Collective] = field(default_factory=list)
    groups: AxisGroups = field(default_factory=AxisGroups)

    def add(self, collective: Collective) -> None:
        """Add one collective."""
        self.items.append(collective)

    def forget(self) -> None:
        """Start a new step."""
        self.items = []


def sum_by_axis(items: Iterable[Collective]) -> dict[str, AxisTraffic]:
    """What moves along each axis. The few numbers that ranks of several axes agree on are left
    out."""
    along: dict[str, list[Collective]] = defaultdict(list)
    for item in items:
        along[item.axis].append(item)
    return {
        axis: AxisTraffic(
            sum(item.num_bytes for item in along[axis]), sum(item.seconds for item in along[axis])
        )
        for axis in AXES
        if axis in along
    }


def sum_traffic(items: Iterable[Collective]) -> list[TrafficRow]:
    """One row for each kind, axis and shape of group, the heaviest first."""
    groups: dict[tuple[Kind, str, int, int], list[Collective]] = defaultdict(list)
    for item in items:
        groups[item.kind, item.axis, item.ranks, item.stride].append(item)
    rows = [
        TrafficRow(
            *key,
            count=len(members),
            num_bytes=sum(member.num_bytes for member in members),
            seconds=sum(member.seconds for member in members),
        )
        for key, members in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.num_bytes)
