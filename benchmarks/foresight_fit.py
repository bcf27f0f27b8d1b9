"""Fit profiles to published runs: least error of the logarithm, drawn to where the fit starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from shardwise.compare.profiles import (
    FOLDS,
    STACKS,
    START,
    Parameters,
    Profiles,
    StackProfile,
    families_of,
    family_of,
    fold_of,
    is_typical,
    predict,
)
from shardwise.compare.published_rows import PublishedRun

Vector = NDArray[np.float64]
# A miss above this counts in proportion, not squared: some published rows are odd.
_ODD = 0.05
# A family weighs as much as this many rows at most, or the largest would be the generic profile.
_HEAVIEST = 40


def fit_profiles(runs: Sequence[PublishedRun], say: Callable[[str], None]) -> Profiles:
    """The generic profile, with every family left out in turn; then each stack from what the
    generic one is without it, with every fifth of its rows left out in turn."""
    start = {name: value for name, (value, _) in START.items()}
    typical = [run for run in runs if is_typical(run)]
    say(f"generic, {len(typical)} rows")
    generic = StackProfile(
        parameters=_fit_generic(typical, start),
        without={
            family: _fit_generic([run for run in typical if family_of(run.source) != family], start)
            for family in families_of(typical)
        },
    )
    stacks = {}
    for stack in STACKS:
        own = [run for run in runs if family_of(run.source) == stack.name]
        say(f"{stack.name}, {len(own)} rows")
        begin = {**generic.without.get(stack.name, generic.parameters), **stack.start}
        without = {
            str(fold): fit([run for run in own if fold_of(run) != str(fold)], begin)
            for fold in range(FOLDS)
        }
        stacks[stack.name] = StackProfile(parameters=fit(own, begin), without=without)
    seen = frozenset(run.key for run in runs)
    return Profiles(seen=seen, generic=generic, stacks=stacks)


def _fit_generic(runs: Sequence[PublishedRun], start: Parameters) -> dict[str, float]:
    size = Counter(family_of(run.source) for run in runs)
    return fit(runs, start, [min(1.0, _HEAVIEST / size[family_of(run.source)]) for run in runs])


def fit(
    runs: Sequence[PublishedRun], start: Parameters, weights: Sequence[float] | None = None
) -> dict[str, float]:
    """Parameters that explain the runs, near `start`."""
    problem = _Problem(
        runs=runs,
        origin=np.log([start[name] for name in START]),
        spread=np.array([spread for _, spread in START.values()]),
        weights=np.ones(len(runs)) if weights is None else np.array(weights),
    )
    return _named(problem.solve() if runs else problem.origin)


def _named(point: Vector) -> dict[str, float]:
    return dict(zip(START, np.exp(point).tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Logarithms of parameters to be found."""

    runs: Sequence[PublishedRun]
    origin: Vector
    spread: Vector
    weights: Vector

    def misses(self, point: Vector) -> Vector:
        """Logarithms of predicted over published."""
        parameters = _named(point)
        return np.array([log(predict(run, parameters)[0] / run.published) for run in self.runs])

    def cost(self, point: Vector, misses: Vector) -> float:
        size = np.abs(misses)
        robust = np.where(size < _ODD, size**2 / 2, _ODD * (size - _ODD / 2))
        drawn = ((point - self.origin) / self.spread) ** 2 / 2
        return float((self.weights * robust).sum() / _ODD**2 + drawn.sum())

    def solve(self) -> Vector:
        """Levenberg-Marquardt; large misses have less weight the larger they are."""
        point, misses = self.origin, self.misses(self.origin)
        cost, damping = self.cost(point, misses), 1e-2
        for _ in range(40):
            normal, gradient = self._slope(point, misses)
            for _ in range(8):
                damped = normal + damping * np.diag(np.diag(normal))
                trial = point - np.clip(np.linalg.solve(damped, gradient), -0.5, 0.5)
                found = self.misses(trial)
                if (value := self.cost(trial, found)) < cost:
                    break
                damping *= 6
            else:
                return point
            gained, cost = cost - value, value
            point, misses, damping = trial, found, max(damping / 5, 1e-6)
            if gained < 1e-4 * cost:
                return point
        return point

    def _slope(self, point: Vector, misses: Vector) -> tuple[Vector, Vector]:
        slopes = np.empty((len(misses), len(point)))
        for index in range(len(point)):
            moved = point.copy()
            moved[index] += 0.01
            slopes[:, index] = (self.misses(moved) - misses) / 0.01
        trust = self.weights * np.minimum(1.0, _ODD / np.maximum(np.abs(misses), 1e-9)) / _ODD**2
        normal = slopes.T @ (trust[:, None] * slopes) + np.diag(self.spread**-2)
        gradient = slopes.T @ (trust * misses) + (point - self.origin) / self.spread**2
        return normal, gradient
