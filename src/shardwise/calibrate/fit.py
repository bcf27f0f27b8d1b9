"""Two numbers from a curve: what large work reaches, and what small work loses."""

from __future__ import annotations

from collections.abc import Sequence

# A limit that lies further above all points than this was not measured, only guessed.
_FLAT_ENOUGH = 0.25


def fit_saturation(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(limit, half) of `rate = limit x size / (size + half)`, from pairs of size and rate."""
    # 1/rate is linear in 1/size. Multiplied by the rate, errors become relative.
    flat, steep = _least_squares([(rate, rate / size) for size, rate in points])
    best = max(rate for _, rate in points)
    if flat * best < _FLAT_ENOUGH:
        return best, 0.0
    return 1 / flat, steep / flat


def fit_link(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(seconds per hop, bytes per second) from triples of hops, bytes and seconds."""
    terms = [(hops / seconds, moved / seconds) for hops, moved, seconds in points]
    hop_s, byte_s = _least_squares(terms)
    return hop_s, 1 / byte_s if byte_s > 0 else float("inf")


def _least_squares(terms: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The non-negative a and b that bring every `a x + b y` nearest to 1."""
    xx = sum(x * x for x, _ in terms)
    xy = sum(x * y for x, y in terms)
    yy = sum(y * y for _, y in terms)
    x1, y1 = sum(x for x, _ in terms), sum(y for _, y in terms)
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    # One of the two is zero: take the other one, with the smaller error.
    only_x, only_y = (x1 / xx if xx else 0.0), (y1 / yy if yy else 0.0)
    error_x = sum((only_x * x - 1) ** 2 for x, _ in terms)
    error_y = sum((only_y * y - 1) ** 2 for _, y in terms)
    return (only_x, 0.0) if error_x <= error_y else (0.0, only_y)
