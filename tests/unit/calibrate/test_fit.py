from __future__ import annotations

import pytest

from shardwise.calibrate.fit import fit_link, fit_saturation


def test_a_saturating_curve_gives_its_limit_and_its_half() -> None:
    points = [(width, 7e14 * width / (width + 180)) for width in (512, 1024, 4096, 8192)]
    limit, half = fit_saturation(points)
    assert limit == pytest.approx(7e14)
    assert half == pytest.approx(180)


def test_a_curve_that_falls_has_no_half() -> None:
    """At their power limit wide matmuls can be slower than narrow ones."""
    limit, half = fit_saturation([(512, 7e14), (8192, 6.5e14)])
    assert half == 0
    assert 6.5e14 < limit < 7e14


@pytest.mark.parametrize("last", [2e9, 2.5e9])
def test_a_curve_that_does_not_saturate_keeps_its_best(last: float) -> None:
    assert fit_saturation([(64, 1e9), (128, last)]) == (last, 0.0)


def test_a_link_gives_its_hop_and_its_rate() -> None:
    points = [(hops, size, hops * 2e-4 + size / 1e9) for hops in (1, 2) for size in (1e4, 1e6, 1e8)]
    hop_s, bytes_per_s = fit_link(points)
    assert hop_s == pytest.approx(2e-4)
    assert bytes_per_s == pytest.approx(1e9)


def test_a_link_without_latency() -> None:
    hop_s, bytes_per_s = fit_link([(1, 1e6, 0.9e-3), (1, 1e8, 1.1e-1)])
    assert hop_s == 0
    assert 0.9e9 < bytes_per_s < 1.1e9
