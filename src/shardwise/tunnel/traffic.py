"""The communication of a step: every collective in order, and their sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.facts.fabric import Collective as Kind


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

    unit: str
    """The unit whose parameters or gradients it moves; empty for what blocks exchange, and for the
    few numbers that ranks agree on."""


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """All collectives of one kind in groups of one shape."""

    kind: Kind
    ranks: int
    stride: int
    count: int
    num_bytes: int
    seconds: float


@dataclass(slots=True)
class Traffic:
    """The collectives of one step in the order in which they were issued."""

    items: list[Collective] = field(default_factory=list)

    def add(self, collective: Collective) -> None:
        """Add one collective."""
        self.items.append(collective)

    def forget(self) -> None:
        """Start a new step."""
        self.items = []


def sum_traffic(items: Iterable[Collective]) -> list[TrafficRow]:
    """One row for each kind and shape of group, the heaviest first."""
    groups: dict[tuple[Kind, int, int], list[Collective]] = defaultdict(list)
    for item in items:
        groups[item.kind, item.ranks, item.stride].append(item)
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
