"""Adapters on one GPU: the plan beside what is measured, and PEFT under Hugging Face Trainer.

    python benchmarks/adapters.py [--rows 'llama-3.1-8b/lora/2-none@4096' ...] [--steps 4]
        [--peers plain liger compile ...] [--warm 12] [--profile '*8b*' ...] [--seconds 460]
        [--json FILE]
    python benchmarks/adapters.py --plan-only
    python benchmarks/adapters.py --table FILE ...

A row is a model, `lora`, `qlora` (NF4) or `float8` (frozen weights in float8), and a setting of
families.py: rank 16 on all linear layers, those of experts too, on random tokens and random
weights. `--peers` runs the same by PEFT: `plain`, or words such as compile and liger; `qlora` takes
bitsandbytes' layers there, `float8` bf16 as `lora` does. A row that fails says why. FILE is written
after every row, and rows that it holds already are not run again.

All rows are planned first, then `--warm` of them at once make a step with the fewest layers, so
that the compiler's results are on disk. Then each is run in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

from adapter_rows import ROWS, Row, compile_row, measure_ours, measure_peft, plan_row
from board_options import board_parser
from family_forks import Answer, Call, run_calls
from family_rows import OURS, planned, shortest_bytes
from family_run import Board
from family_table import (
    count,
    gib,
    line_of,
    memory_error,
    plain,
    share,
    show_terms,
    signed,
    speed_error,
    summary,
    table,
)
from forked_measures import import_ahead, import_torch
from gpu import driver, versions
from shardwise.errors import UserError
from shardwise.facts.allocator import ALLOCATOR
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.presets import PRESETS
from shardwise.plan.planned import Plan

# No row takes longer, unless something hangs.
_ROW_S = 240.0
# Of the device's memory, for rows that compile at the same time.
_ROOM = 0.85


@dataclass(slots=True)
class Bench:
    """Plans, compiles and measures rows."""

    given: argparse.Namespace
    board: Board
    ends: float
    plans: dict[Row, Plan] = field(default_factory=dict)

    def plan(self, rows: Sequence[Row]) -> None:
        """Plan all of ours, a process for each kind of adapter of a model: what it counts is kept
        for the rows after it."""
        ours = [row for row in rows if row.who == OURS]
        kinds = list(dict.fromkeys((row.model, row.method) for row in ours))
        groups = [[row for row in ours if (row.model, row.method) == kind] for kind in kinds]
        calls = [
            self._call(f"plan-{model}-{method}", partial(_plan_all, group, self.given.gpu))
            for (model, method), group in zip(kinds, groups, strict=True)
        ]
        for index, answer in run_calls(calls, at_once=os.cpu_count() or 1, ends=self.ends):
            found = answer.value or dict.fromkeys(groups[index], answer.problem)
            for row, plan in found.items():
                if isinstance(plan, str):
                    self.board.put(row, {"problem": plan})
                    continue
                self.plans[row] = plan
                self.board.put(row, planned(plan))
        print(f"{len(self.plans)} of {len(ours)} rows are planned", flush=True)

    def compile(self, rows: Sequence[Row]) -> None:
        """All of ours at once; what fails here will say so in its turn."""
        ours = [row for row in rows if row in self.plans]
        calls = [
            self._call(
                f"warm-{row}",
                partial(compile_row, self.plans[row], row, self.given.device),
                shortest_bytes(self.plans[row], row.least_layers),
            )
            for row in ours
        ]
        room = _ROOM * parse_cluster(f"1x{self.given.gpu}").memory_bytes
        done = run_calls(calls, at_once=self.given.warm, room=room, limit_s=_ROW_S, ends=self.ends)
        for index, answer in done:
            said = answer.problem or "compiled"
            print(f"{ours[index]}: {said} ({answer.took_s:.0f} s)", flush=True)

    def run(self, rows: Sequence[Row]) -> None:
        """One after the other."""
        left = [row for row in rows if row in self.plans or row.who != OURS]
        calls = [self._call(str(row), partial(self._measure, row)) for row in left]
        limit_s = self.given.row_seconds
        for index, answer in run_calls(calls, limit_s=limit_s, ends=self.ends):
            row, found = left[index], self._found(left[index], answer)
            self.board.put(row, found)
            print(f"{line_of({**row.names, **found})}   ({answer.took_s:.0f} s)", flush=True)

    def _measure(self, row: Row) -> dict[str, Any]:
        given = self.given
        if row.who != OURS:
            return measure_peft(row, given.steps, given.device)
        is_traced = any(fnmatch(str(row), pattern) for pattern in given.profile)
        trace = given.logs / f"{_file_name(row)}.json.gz" if is_traced else None
        return measure_ours(self.plans[row], given.device, given.steps, trace)

    def _found(self, row: Row, answer: Answer) -> dict[str, Any]:
        said = planned(self.plans[row]) if row.who == OURS else {}
        found = answer.value or {"problem": answer.problem}
        return {**said, **found, "took_s": round(answer.took_s, 1)}

    def _call(self, name: str, work: Callable[[], Any], needs: float = 0.0) -> Call:
        return Call(work, self.given.logs / f"{_file_name(name)}.log", needs)


def _plan_all(rows: Sequence[Row], gpu: str) -> dict[Row, Plan | str]:
    found: dict[Row, Plan | str] = {}
    for row in rows:
        try:
            found[row] = plan_row(row, gpu)
        except UserError as error:
            found[row] = f"{error.what}: {error.why}"
    return found


def _file_name(name: object) -> str:
    return str(name).replace("/", "_")


def main() -> None:
    given = parse()
    os.environ.setdefault(*ALLOCATOR)
    if given.table:
        print("\n\n".join(markdown(json.loads(path.read_text("utf-8"))) for path in given.table))
        return
    ends = time.monotonic() + given.seconds
    rows = rows_of(given)
    if not rows:
        sys.exit("no row has all of these names")
    given.logs.mkdir(parents=True, exist_ok=True)
    import_torch()
    if given.device == "cuda":
        import_ahead({PRESETS[row.model]["model_type"] for row in rows})
    board = Board.open(given.json, {"gpu": given.gpu, "driver": driver(), **versions()})
    new = [row for row in rows if not board.holds(row)]
    bench = Bench(given, board, ends)
    bench.plan(new)
    if not given.plan_only:
        if given.warm:
            bench.compile(new)
        if not given.compile_only:
            bench.run(new)
    print(f"\n{markdown(board.results)}")


def parse() -> argparse.Namespace:
    parser = board_parser(__doc__, "runs/adapters")
    parser.add_argument("--rows", nargs="+", default=["*"], help="rows, or patterns of the usual")
    parser.add_argument("--peers", nargs="+", default=[], metavar="MODE")
    parser.add_argument("--only-peers", action="store_true", help="none of ours")
    parser.add_argument("--steps", type=int, default=4, help="measured in each row")
    parser.add_argument("--warm", type=int, default=12, help="rows that compile at once; 0: none")
    parser.add_argument("--compile-only", action="store_true", help="measure nothing")
    parser.add_argument("--row-seconds", type=float, default=_ROW_S, help="of one row, at most")
    parser.add_argument("--profile", nargs="+", default=[], help="rows whose kernels are listed")
    given = parser.parse_args()
    if given.device == "cpu" and not given.plan_only:
        given.gpu = "CPU"
    return given


def rows_of(given: argparse.Namespace) -> list[Row]:
    """Rows that match a pattern of the usual ones or are named in full, in the order given; each
    then by the peers."""
    found = {
        text: None
        for pattern in given.rows
        for text in ([each for each in ROWS if fnmatch(each, pattern)] or [pattern])
    }
    ours = [Row.parse(text) for text in found]
    if given.gpu == "CPU":
        ours = list(dict.fromkeys(row.tiny() for row in ours))
    whose = [*([] if given.only_peers else [OURS]), *given.peers]
    return [replace(row, who=who) for row in ours for who in whose]


_HEAD = (
    *("row", "plan GiB", "reserved", "error", "plan tok/s", "tok/s", "error", "MFU", "ours ÷ it"),
    "problem",
)


def markdown(data: Mapping[str, Any]) -> str:
    """All of a file of results."""
    rows: Sequence[Mapping[str, Any]] = data["rows"]
    ours = [row for row in rows if row["who"] == OURS]
    speeds = {row["row"]: row.get("tok_s") for row in ours}
    machine = ", ".join(f"{name} {value}" for name, value in data["machine"].items() if value)
    shown = table(_HEAD, (_cells(row, speeds) for row in rows))
    terms = (show_terms(row) for row in ours if row.get("kernels"))
    return "\n\n".join((f"{machine}.", shown, summary(ours), *terms))


def _cells(row: Mapping[str, Any], speeds: Mapping[str, float | None]) -> list[str]:
    mine = speeds.get(row["row"].removesuffix(f"/{row['who']}")) if row["who"] != OURS else None
    return [
        row["row"],
        *(gib(row.get("plan_gib")), gib(row.get("reserved_gib")), signed(memory_error(row))),
        *(count(row.get("plan_tok_s")), count(row.get("tok_s")), signed(speed_error(row))),
        share(row.get("mfu")),
        f"{mine / row['tok_s']:.2f}" if mine and row.get("tok_s") else "-",
        plain(row.get("problem", "")),
    ]


if __name__ == "__main__":
    main()
