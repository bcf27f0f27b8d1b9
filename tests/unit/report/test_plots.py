"""Axes and points by themselves."""

from __future__ import annotations

import random

import pytest

from shardwise.report.axis import Axis, axis_of, labels
from shardwise.report.plots import MAX_POINTS, Band, Plot, PlotPoint, Series, draw_plot, thin


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 100], ["0", "50", "100"]),
        ([10_000, 12_000], ["10.0k", "10.5k", "11.0k", "11.5k", "12.0k"]),
        ([0.0001, 0.0003], ["1e-4", "1.5e-4", "2e-4", "2.5e-4", "3e-4"]),
        ([1.5, 1.5], ["1.45", "1.50", "1.55"]),
        ([0, 0], ["0.0", "0.2", "0.4"]),
        ([-3, 3], ["-2", "0", "2"]),
    ],
)
def test_ticks_are_round_and_their_labels_alike(values: list[float], expected: list[str]) -> None:
    found = labels(axis_of(values, 0, 1).ticks(5))
    assert set(expected) <= set(found)


def test_ticks_hold_for_any_range() -> None:
    dice = random.Random(0)
    for _ in range(500):
        size = 10.0 ** dice.uniform(-90, 90)
        values = [dice.uniform(-size, size) for _ in range(dice.randint(1, 3))]
        axis = axis_of(values, 0.0, 100.0)
        ticks = axis.ticks(5)
        assert 1 <= len(ticks) <= 8
        assert all(axis.low - 1e-6 * size <= tick <= axis.high + 1e-6 * size for tick in ticks)
        assert len(labels(ticks)) == len(ticks)
        assert all(0 <= axis.place(value) <= 100 for value in values)


def test_labels_of_neighbours_differ_and_are_short() -> None:
    dice = random.Random(1)
    for _ in range(500):
        low = 10.0 ** dice.uniform(-4, 7)
        found = labels(axis_of([low, low * (1 + 10.0 ** dice.uniform(-3, 1))], 0, 1).ticks(5))
        assert len(set(found)) == len(found), found
        assert max(map(len, found)) <= 9, found


def test_whole_ticks_have_no_fractions() -> None:
    assert Axis(0.9, 2.1, 0, 1).ticks(5, whole=True) == [1.0, 2.0]


def points(*heights: float) -> tuple[PlotPoint, ...]:
    return tuple(PlotPoint(at, height, f"{height:g}") for at, height in enumerate(heights))


def test_thinning_keeps_the_extremes_and_the_order() -> None:
    heights = [random.Random(2).random() for _ in range(10_000)]
    heights[4321], heights[8765] = 99.0, -99.0
    kept = thin(points(*heights))
    assert len(kept) <= MAX_POINTS
    assert {99.0, -99.0} <= {point.y for point in kept}
    assert [point.x for point in kept] == sorted(point.x for point in kept)


def test_a_plot_says_how_many_points_it_has() -> None:
    series = Series(name="a", points=points(*range(10_000)), colour=0)
    page = draw_plot(Plot(name="p", title="P", series=(series,)))
    drawn = page.count("<circle ")
    assert f'data-points="{drawn}"' in page
    assert f"{drawn} of 10000 points are drawn" in page


def test_warm_up_does_not_stretch_the_axis() -> None:
    slow = PlotPoint(0, 500.0, "500 s", warming=True)
    series = Series(name="a", points=(slow, *points(1.0, 1.1, 1.0)), colour=0)
    page = draw_plot(Plot(name="p", title="P", series=(series,)))
    assert "500 s, the first of a start, beyond the axis" in page
    assert ">400<" not in page


def test_a_band_is_inside_the_axis() -> None:
    band = Band(planned=100.0, share=0.1, colour=0, name="plan 100 ± 10%")
    series = Series(name="a", points=points(50.0, 51.0), colour=0)
    page = draw_plot(Plot(name="p", title="P", series=(series,), bands=(band,)))
    assert ">100<" in page
    assert "plan 100 ± 10%" in page


def test_nothing_measured_is_said() -> None:
    page = draw_plot(Plot(name="mfu", title="MFU", series=(), note="no MFU: unknown device"))
    assert 'id="plot-mfu"' in page
    assert 'data-points="0"' in page
    assert "no MFU: unknown device" in page
