"""Times of collectives as rows, as a histogram, and as the rank that is late."""

from __future__ import annotations

import pytest

from shardwise.metrics.collectives import (
    BOUNDS,
    Histogram,
    HostStamp,
    Sample,
    judge_waits,
    summarise,
)


def sample(kind: str, phase: str, num_bytes: int, ranks: int = 4) -> Sample:
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


def test_a_histogram_counts_up_to_each_bound() -> None:
    found = Histogram()
    for seconds in (5e-5, 1e-4, 0.15, 99.0):
        found.add(seconds)
    data = found.to_dict()
    counts = dict(map(tuple, data["buckets"]))
    assert list(counts) == list(BOUNDS)
    assert counts[1e-4] == 2 and counts[0.1] == 2 and counts[0.2] == 3 and counts[10.0] == 3
    assert data["count"] == 4 and data["sum"] == pytest.approx(99.15015)


@pytest.mark.parametrize(
    ("waits", "late"),
    [
        ([0.25, 0.05, 0.25, 0.26], 1),
        ([0.05, 0.30], 0),
        ([0.25, 0.24, 0.25, 0.26], None),
        ([0.004, 0.001], None),
        ([0.2], None),
    ],
)
def test_the_rank_that_waits_least_is_the_one_that_is_late(
    waits: list[float], late: int | None
) -> None:
    found = judge_waits(waits, step_s=1.0)
    assert (None if found is None else found["rank"]) == late
