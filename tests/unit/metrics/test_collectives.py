"""Times of collectives as rows, as a histogram, and as what a rank waits in every step."""

from __future__ import annotations

import pytest
import torch

from shardwise.facts.collective_cost import Collective
from shardwise.metrics.collectives import (
    BOUNDS,
    CollectiveTimer,
    Histogram,
    HostStamp,
    Sample,
    summarise,
)
from shardwise.metrics.straggler import JUDGED_STEPS
from shardwise.parallel.mesh import World


def sample(kind: Collective, phase: str, num_bytes: int, ranks: int = 4) -> Sample:
    return Sample(kind, phase, "block", num_bytes, ranks, HostStamp(), HostStamp())


def test_rows_are_by_kind_and_phase() -> None:
    gather = sample("all_gather", "forward", 4_000_000)
    timed = [(gather, 0.001), (gather, 0.003), (gather, 0.002)]
    timed += [(sample("reduce_scatter", "backward", 8_000_000), 0.01)]
    first, second = summarise(timed)
    assert (first["kind"], first["phase"], first["count"]) == ("all_gather", "forward", 3)
    assert first["p50_s"] == 0.002 and first["p99_s"] == 0.003
    assert first["bytes"] == 12_000_000
    # Three quarters of the bytes cross a link of a ring of four.
    assert first["bus_bytes_per_s"] == pytest.approx(9_000_000 / 0.006)
    assert second["bus_bytes_per_s"] == pytest.approx(6_000_000 / 0.01)
    # An all-reduce goes around twice.
    [third] = summarise([(sample("all_reduce", "backward", 8_000_000), 0.01)])
    assert third["bus_bytes_per_s"] == pytest.approx(12_000_000 / 0.01)


def test_a_histogram_counts_up_to_each_bound() -> None:
    found = Histogram()
    for seconds in (5e-5, 1e-4, 0.15, 99.0):
        found.add(seconds)
    data = found.to_dict()
    counts = dict(map(tuple, data["buckets"]))
    assert list(counts) == list(BOUNDS)
    assert counts[1e-4] == 2 and counts[0.1] == 2 and counts[0.2] == 3 and counts[10.0] == 3
    assert data["count"] == 4 and data["sum"] == pytest.approx(99.15015)


def test_waits_are_of_steps_and_not_of_evaluations() -> None:
    timer = CollectiveTimer(torch.device("cpu"), SOLO)
    timer.enter("eval")
    take(timer, 1.0)
    for step in range(JUDGED_STEPS - 1):
        timer.enter("agree")
        timer.enter("forward")
        take(timer, 2.0 + step)
        timer.end_step()
        timer.enter("eval")
        take(timer, 100.0)
    timer.report(step_s=1.0)
    # A little more than the collectives: the ranks' meeting at the begin of a step counts too.
    assert list(timer.waits) == pytest.approx([2.0 + step for step in range(9)], abs=0.5)
    assert [len(spans) for spans in timer.spans] == [0]


def take(timer: CollectiveTimer, seconds: float) -> None:
    """A collective that has just ended after so many seconds."""
    started = HostStamp()
    started.moment -= seconds
    timer.note("all_gather", "block", 16, SoloGroup(), started)


class SoloGroup:
    def size(self) -> int:
        return 1


SOLO = World(0, 1, 0, SoloGroup())
