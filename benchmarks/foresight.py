"""How well step times are foreseen: the planner's time model against published runs.

    python benchmarks/foresight.py [--rows FILE] [--worst 15] [--fit]

FILE is a CSV with the columns of src/shardwise/compare/published_runs.csv, which is read without
`--rows`. Every error is of a row that the numbers behind its prediction have not seen. A stack with
a profile is predicted by that, fitted without the row; and every stack also by the generic profile,
fitted without the whole stack. `--fit` fits the profiles to FILE's rows and writes them to
src/shardwise/compare/profiles.json. No fit has seen the rows of held_out_runs.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path

from shardwise.compare.profiles import PROFILES, Parameters, Profiles, family_of, predict
from shardwise.compare.published_rows import (
    PUBLISHED,
    PublishedRun,
    PublishedTable,
    SkippedRow,
    read_table,
)
from shardwise.plan.time import TimeEstimate


@dataclass(frozen=True, slots=True)
class Bar:
    """What is asked of a group of rows."""

    name: str
    median: float
    ninth_decile: float | None = None


CALIBRATED = Bar("calibrated stacks", 0.06, 0.15)  # ranks that share nothing
NEVER_SEEN = Bar("stacks never seen", 0.12, 0.30)
NO_PROFILE = Bar("stacks without a profile", 0.08, 0.25)
AXES = Bar("tensor, context or expert parallel, calibrated stacks", 0.08, 0.20)
ADAPTERS = Bar("LoRA and QLoRA, stacks never seen", 0.10)
# How far a run with a pipeline may be from what was foreseen for it.
_NEAR = 0.15
# How far each term is usually off, as a standard deviation of its logarithm: matmuls hardly, what
# hides behind what a lot.
_DOUBT = {
    "matmul": 0.08,
    "attention": 0.2,
    "elementwise": 0.3,
    "loss": 0.4,
    "recompute": 0.15,
    "copies": 0.4,
    "launch": 0.6,
    "tensor_parallel": 0.3,
    "expert_parallel": 0.3,
    "exposed": 0.5,
    "waiting": 0.7,
    "bubble": 0.3,
    "optimizer": 0.5,
    "offload": 0.5,
    "other": 0.7,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run and what was foreseen for it."""

    run: PublishedRun
    predicted: float
    estimate: TimeEstimate

    @property
    def error(self) -> float:
        """Of tokens per second; positive: it was slower than foreseen."""
        return self.predicted / self.run.published - 1

    @property
    def blame(self) -> str:
        """The term that would have to be least out of character to explain the miss alone.

        A run that was many times faster than predicted has no such term: a step would take longer
        than was published even without any one of them.
        """
        missing = self.estimate.total * self.error
        factors = {
            name: (seconds + missing) / seconds
            for name, seconds in asdict(self.estimate).items()
            if seconds > 0 and seconds + missing > 0
        }
        if not factors:
            return "no term alone"
        strange = {name: abs(log(factor)) / _DOUBT[name] for name, factor in factors.items()}
        name = min(strange, key=lambda each: strange[each])
        return f"{name.replace('_', ' ')} x{factors[name]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=PUBLISHED)
    parser.add_argument("--worst", type=int, default=15)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    options = parser.parse_args()
    try:
        table = read_table(options.rows)
    except (OSError, csv.Error) as error:
        sys.exit(f"cannot read {options.rows}: {error}")
    if options.fit:
        from foresight_fit import fit_profiles

        fit_profiles(table.runs, print).save(options.profiles)
    report(options.rows, table, Profiles.load(options.profiles), options.worst)


def report(path: Path, table: PublishedTable, profiles: Profiles, worst: int) -> None:
    """All that there is to say about a file."""
    known = [(run, profiles.calibrated(run)) for run in table.runs]
    calibrated = [_foresee(run, found) for run, found in known if found is not None]
    unseen = [_foresee(run, profiles.unseen(run)) for run in table.runs]
    print(f"{path}: {len(table.runs)} rows used, {len(table.skipped)} skipped\n")
    print_skipped(table.skipped)
    print(f"{CALIBRATED.name}, each row by its stack's profile fitted without the row")
    print_groups((outcome.run.source, outcome) for outcome in calibrated)
    fitted = [_foresee(run, found) for run in table.runs if (found := profiles.fitted(run))]
    if fitted:
        print(f"  for comparison, by profiles fitted with the row: {_figures(fitted)}\n")
    print(f"{NEVER_SEEN.name}, each stack by the generic profile fitted without the stack")
    print_groups((family_of(outcome.run.source), outcome) for outcome in unseen)
    without = [outcome for outcome in unseen if profiles.calibrated(outcome.run) is None]
    print_worst(CALIBRATED, calibrated, worst)
    print_worst(NO_PROFILE, without, worst)
    shared = [outcome for outcome in calibrated if has_axes(outcome.run)]
    print(f"{AXES.name}, by stack")
    print_groups((family_of(outcome.run.source), outcome) for outcome in shared)
    print_pipelines([outcome for outcome in calibrated if outcome.run.decided.pipeline > 1])
    print_verdict(CALIBRATED, [outcome for outcome in calibrated if not has_axes(outcome.run)])
    print_verdict(NEVER_SEEN, unseen)
    print_verdict(NO_PROFILE, without)
    print_verdict(AXES, shared)
    print_verdict(ADAPTERS, [outcome for outcome in unseen if outcome.run.traits.frozen])


def has_axes(run: PublishedRun) -> bool:
    """Whether ranks share matmuls, sequences or experts."""
    return max(run.decided.tensor, run.decided.context, run.decided.expert) > 1


def _foresee(run: PublishedRun, parameters: Parameters) -> Outcome:
    predicted, estimate = predict(run, parameters)
    return Outcome(run=run, predicted=predicted, estimate=estimate)


def print_skipped(skipped: Sequence[SkippedRow]) -> None:
    reasons: dict[str, list[SkippedRow]] = defaultdict(list)
    for row in skipped:
        reasons[row.why].append(row)
    for why, rows in reasons.items():
        sources = ", ".join(dict.fromkeys(_short(row.source, 24) for row in rows))
        lines = ", ".join(str(row.line) for row in rows)
        print(f"  skipped: {why} (line {lines}; {sources})")
    if skipped:
        print()


def print_groups(named: Iterable[tuple[str, Outcome]]) -> None:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for name, outcome in named:
        groups[name].append(outcome)
    for name, outcomes in sorted(groups.items(), key=lambda each: -len(each[1])):
        print(f"  {_short(name, 56):56} {_figures(outcomes)}")
    everything = [outcome for outcomes in groups.values() for outcome in outcomes]
    if everything:
        print(f"  {'all':56} {_figures(everything)}\n")


def print_pipelines(outcomes: Sequence[Outcome]) -> None:
    """Each run whose blocks are divided into stages, and how many are near."""
    if not outcomes:
        return
    print("calibrated stacks with a pipeline, each row as above, and how long its ranks wait")
    for outcome in outcomes:
        waits = outcome.estimate.bubble / outcome.estimate.total
        print(f"  {_miss(outcome, f'waits {waits:5.1%}')}")
    near = sum(abs(outcome.error) <= _NEAR for outcome in outcomes)
    print(f"  {near} of {len(outcomes)} within {_NEAR:.0%}: {_figures(outcomes)}\n")


def print_worst(bar: Bar, outcomes: Sequence[Outcome], number: int) -> None:
    largest = sorted(outcomes, key=lambda outcome: -abs(outcome.error))[:number]
    if not largest:
        return
    print(f"worst rows of {bar.name}, and the term to blame with what it would have to be")
    for outcome in largest:
        print(f"  {_miss(outcome, f'{outcome.blame:22}')}")
    print()


def print_verdict(bar: Bar, outcomes: Sequence[Outcome]) -> None:
    if not outcomes:
        print(f"{bar.name}: no rows")
        return
    median, ninth_decile = _median(outcomes), _ninth_decile(outcomes)
    passes = median <= bar.median
    asked = ""
    if bar.ninth_decile is not None:
        passes = passes and ninth_decile <= bar.ninth_decile
        asked = f" (bar {bar.ninth_decile:.0%})"
    print(
        f"{'PASS' if passes else 'FAIL'}  {bar.name}: {len(outcomes)} rows, median {median:.1%} "
        f"(bar {bar.median:.0%}), 90th percentile {ninth_decile:.1%}{asked}"
    )


def _miss(outcome: Outcome, why: str) -> str:
    run = outcome.run
    doubted = " (the table doubts it)" if run.doubted else ""
    return (
        f"{outcome.error:+6.1%}  {why} line {run.line:<4} {run.label}: "
        f"{outcome.predicted:,.0f} foreseen, {run.published:,.0f} published{doubted}"
    )


def _figures(outcomes: Sequence[Outcome]) -> str:
    largest = max(abs(outcome.error) for outcome in outcomes)
    return (
        f"{len(outcomes):4} rows  median {_median(outcomes):6.1%}  p90 "
        f"{_ninth_decile(outcomes):6.1%}  max {largest:6.1%}"
    )


def _median(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(abs(outcome.error) for outcome in outcomes)


def _ninth_decile(outcomes: Sequence[Outcome]) -> float:
    """With linear interpolation between ranks, as numpy has it."""
    sizes = sorted(abs(outcome.error) for outcome in outcomes)
    if len(sizes) == 1:
        return sizes[0]
    return statistics.quantiles(sizes, n=10, method="inclusive")[-1]


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


if __name__ == "__main__":
    main()
