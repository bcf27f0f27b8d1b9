"""Tensor, context and expert parallelism on one GPU: what rank 0 takes, and whether ranks agree.

    python benchmarks/axes.py [--rows 'llama-3.1-8b/*' ...] [--steps N] [--seconds 260]
        [--ranks eager compiled none] [--json FILE]
    python benchmarks/axes.py --plan-only
    python benchmarks/axes.py --table FILE ...

A row is rank 0 of a cluster that is not there: a model, nodes and their GPUs, the sizes of axes,
and tokens of a sequence. It runs in the tunnel over free links, and then over the cluster's.
Before that, two and four real ranks train on this device over gloo: tiny models, whose
losses must be those of one process. FILE is written after every row, and rows that it holds already
are not run again.

All rows are planned first. Then each makes a step with two blocks, all at once and beside the
ranks, so that the compiler's results are on disk. Then each is run in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from axes_ranks import Case, cases_of, losses_of, table_of, worst_difference
from axes_rows import ROWS, Row, compile_row, measure_row, plan_row, said_of
from board_options import board_parser
from family_forks import Answer, Call, run_calls
from family_run import Board
from family_table import count, gib, memory_error, plain, share, signed, table
from forked_measures import import_ahead, import_torch
from gpu import driver, versions
from shardwise.facts.allocator import ALLOCATOR
from shardwise.facts.presets import PRESETS
from shardwise.plan.planned import Plan

# Compiling a row, or training on a rank, takes no longer.
_PREPARE_S = 80.0


@dataclass(slots=True)
class Bench:
    """Plans, compares and measures."""

    given: argparse.Namespace
    board: Board
    ends: float
    plans: dict[Row, Plan] = field(default_factory=dict)

    def plan(self, rows: Sequence[Row]) -> None:
        """All at once; what cannot be planned says why."""
        calls = [self._call(f"plan-{row}", partial(plan_row, row, self.given.gpu)) for row in rows]
        for index, answer in run_calls(calls, at_once=len(calls), ends=self.ends):
            row = rows[index]
            if answer.value is None:
                self.board.put(row, {"problem": answer.problem})
                continue
            self.plans[row] = answer.value
            self.board.put(row, said_of(answer.value))
        # They run in the order of their worth, and not in that of the answers.
        self.plans = {row: self.plans[row] for row in rows if row in self.plans}
        print(f"{len(self.plans)} of {len(rows)} rows are planned, {self._left()}", flush=True)

    def prepare(self, cases: Sequence[Case]) -> None:
        """Compile all rows on a GPU, and beside that let real ranks train."""
        given = self.given
        rows = [row for row in self._runnable() if given.device == "cuda" and not row.stands_in]
        places = [(case, rank) for case in cases for rank in range(case.world)]
        with tempfile.TemporaryDirectory() as folder:
            calls = [
                self._call(f"compile-{row}", partial(compile_row, self.plans[row], given.device))
                for row in rows
            ]
            calls += [
                self._call(
                    f"{case}, rank {rank}",
                    partial(losses_of, case, rank, given.device, Path(folder)),
                )
                for case, rank in places
            ]
            at_once = max(8, 3 * (os.cpu_count() or 1) // 2)
            done = run_calls(calls, at_once=at_once, limit_s=_PREPARE_S, ends=self.ends)
            for index, answer in done:
                if index >= len(rows):
                    self._note(*places[index - len(rows)], answer)
                    continue
                said = answer.problem or "compiled"
                print(f"{rows[index]}: {said} ({answer.took_s:.0f} s)", flush=True)

    def run(self) -> None:
        """One row after the other; one that stands in for another only where that has failed."""
        for row in self._runnable():
            if row.stands_in and not self.board.has_failed(row.usual):
                continue
            call = self._call(str(row), partial(self._measure, row))
            ((_, answer),) = run_calls([call], limit_s=row.seconds, ends=self.ends)
            found = answer.value or {"problem": answer.problem}
            took_s = round(answer.took_s, 1)
            self.board.put(row, {**said_of(self.plans[row]), **found, "took_s": took_s})
            print(f"{row}: {_said(found)} ({took_s:.0f} s, {self._left()})", flush=True)

    def _left(self) -> str:
        return f"{self.ends - time.monotonic():.0f} s before the end"

    def _runnable(self) -> list[Row]:
        return [row for row in self.plans if not row.is_planned_only]

    def _measure(self, row: Row) -> dict[str, Any]:
        steps = self.given.steps or row.steps
        return measure_row(self.plans[row], self.given.device, steps, modelled=row.modelled)

    def _note(self, case: Case, rank: int, answer: Answer) -> None:
        """The losses of rank 0, or what went wrong on any rank."""
        cases = self.board.results.setdefault("cases", {})
        found = cases.setdefault(str(case), {})
        if answer.problem:
            found["problem"] = f"rank {rank}: {answer.problem}"
            print(f"{case}, rank {rank}: {answer.problem} ({answer.took_s:.0f} s)", flush=True)
        elif rank == 0:
            found["losses"] = answer.value
        compare(cases)
        self.board.write()

    def _call(self, name: str, work: Callable[[], Any]) -> Call:
        return Call(work, self.given.logs / f"{re.sub('[^A-Za-z0-9@.-]+', '_', name)}.log")


def compare(cases: dict[str, dict[str, Any]]) -> None:
    """Say how far each case is off the one process that it has."""
    for case in (*cases_of(compiled=False), *cases_of(compiled=True)):
        mine, reference = (cases.get(str(each), {}) for each in (case, case.reference))
        if case.world > 1 and "losses" in mine and "losses" in reference:
            mine["off"] = worst_difference(mine["losses"], reference["losses"])


def main() -> None:
    given = parse()
    os.environ.setdefault(*ALLOCATOR)
    if given.table:
        print("\n\n".join(markdown(json.loads(path.read_text("utf-8"))) for path in given.table))
        return
    ends = time.monotonic() + given.seconds
    rows = rows_of(given)
    given.logs.mkdir(parents=True, exist_ok=True)
    import_torch()
    if given.device == "cuda":
        import_ahead({PRESETS[row.model]["model_type"] for row in rows} | {"llama", "mixtral"})
    board = Board.open(given.json, {"gpu": given.gpu, "driver": driver(), **versions()})
    bench = Bench(given, board, ends)
    bench.plan([row for row in rows if not board.holds(row)])
    if not given.plan_only:
        bench.prepare(cases_of(compiled=given.ranks == "compiled") if given.ranks != "none" else [])
        print(f"\n{table_of(board.results.get('cases', {}))}\n", flush=True)
        bench.run()
    print(f"\n{markdown(board.results)}")


def parse() -> argparse.Namespace:
    parser = board_parser(__doc__, "runs/axes")
    parser.add_argument("--rows", nargs="*", default=["*"], help="patterns of the usual rows")
    parser.add_argument("--ranks", choices=("eager", "compiled", "none"), default="eager")
    parser.add_argument("--steps", type=int, help="measured in each row, instead of its own number")
    given = parser.parse_args()
    if given.device == "cpu" and not given.plan_only:
        given.gpu = "CPU"
    return given


def rows_of(given: argparse.Namespace) -> list[Row]:
    """Rows that match a pattern, in the order of their worth."""
    found = [
        row for name, row in ROWS.items() if any(fnmatch(name, pattern) for pattern in given.rows)
    ]
    return [row.tiny() for row in found if not row.stands_in] if given.gpu == "CPU" else found


_HEAD = (
    *("row", "recompute, mb", "plan GiB", "reserved", "error", "plan tok/s", "tok/s"),
    *("free links", "MFU", "free links", "modelled ms", "exposed ms", "problem"),
)


def markdown(data: Mapping[str, Any]) -> str:
    """All of a file of results."""
    machine = ", ".join(f"{name} {value}" for name, value in data["machine"].items() if value)
    parts = [f"{machine}.", table(_HEAD, map(_cells, data["rows"]))]
    return "\n\n".join([*parts, table_of(data["cases"])] if "cases" in data else parts)


def _cells(row: Mapping[str, Any]) -> list[str]:
    picked = row.get("picked", {})
    return [
        row["row"] if row["mesh"] else f"{row['row']}: {_axes_in(picked)}",
        f"{picked.get('recompute', '-')}, {picked.get('micro_batch', '-')}",
        *(gib(row.get("plan_gib")), gib(row.get("reserved_gib")), signed(memory_error(row))),
        *(count(row.get(name)) for name in ("plan_linked_tok_s", "tok_s", "free_tok_s")),
        *(share(row.get(name)) for name in ("mfu", "free_mfu")),
        *(gib(row.get(name)) for name in ("modelled_ms", "exposed_ms")),
        plain(row.get("problem", "")),
    ]


def _axes_in(picked: Mapping[str, Any]) -> str:
    axes = ("replicate", "shard", "context", "tensor", "expert")
    return ", ".join(f"{name} {picked[name]}" for name in axes if picked.get(name, 1) != 1)


def _said(found: Mapping[str, Any]) -> str:
    if found.get("problem"):
        return str(found["problem"])
    return (
        f"{gib(found['reserved_gib'])} GiB, {count(found['tok_s'])} tok/s, MFU "
        f"{share(found['mfu'])}; over free links {count(found['free_tok_s'])} tok/s, "
        f"{share(found['free_mfu'])}; {found['exposed_ms']:.1f} of {found['modelled_ms']:.1f} ms "
        "of communication exposed"
    )


if __name__ == "__main__":
    main()
