"""The scoreboard of families: the plan beside what one GPU measures, and Hugging Face Trainer.

    python benchmarks/families.py [--families gemma-3-12b ...] [--settings 2-none@4096 ...]
        [--places 8 1] [--rows 'mistral-7b/8/*' ...] [--trainer plain compile-liger eager ...]
        [--warm 8] [--steps 4] [--seconds 460] [--profile] [--json FILE]
    python benchmarks/families.py --plan-only
    python benchmarks/families.py --table FILE ...

Each row is one family, cut to a few layers (`family_list.py`), with one setting: memory and tok/s
as planned and as measured, MFU, and the share of the limit (`family_limits.py`). A place is the
number of ranks: 8 is rank 0 of eight over links that take no time, 1 is the GPU alone. A setting is
gpu.py's, with the length of sequences behind it. A row that fails says why. FILE is written after
every row, and rows that it holds already are not run again.

Rows are run in groups: first all of a group at once with as few layers as possible, so that the
compiler's results are on disk, then one after the other, each in a process of its own. `--trainer`
adds runs of Hugging Face Trainer on one GPU: plain, or words such as compile, liger, and eager or
grouped_mm for experts. `--memory-only` runs as many of our rows at once as fit, and times none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch

from board_options import board_parser
from family_list import FAMILIES, PLACES, SETTINGS, Case
from family_rows import PLAIN, Row
from family_run import Bench, Board
from family_table import markdown
from peers.shapes import Setting
from shardwise.facts.allocator import ALLOCATOR


def main() -> None:
    given = parse()
    # As every rank has it: set before torch is imported, for the processes that rows run in too.
    os.environ.setdefault(*ALLOCATOR)
    if given.table:
        print("\n\n".join(markdown(json.loads(path.read_text("utf-8"))) for path in given.table))
        return
    ends = time.monotonic() + given.seconds
    rows = rows_of(given)
    if not rows:
        sys.exit("no row has all of these names")
    given.logs.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        device=given.device,
        gpu=given.gpu,
        steps=given.steps,
        warm=given.warm,
        logs=given.logs,
        profile=given.profile,
        ends=ends,
    )
    board = Board.open(given.json, bench.machine())
    new = [row for row in rows if not board.holds(row)]
    bench.plan(new, board)
    if given.memory_only:
        bench.run_for_memory(new, board)
    elif not given.plan_only:
        if not (given.no_limits or given.compile_only):
            bench.measure_limits()
        bench.run(new, board, compile_only=given.compile_only)
    print(f"\n{markdown(board.results)}")


def parse() -> argparse.Namespace:
    parser = board_parser(__doc__, "runs/families")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--settings", nargs="+", type=Case.parse, help="such as 2-none@4096")
    parser.add_argument("--places", nargs="+", type=int, choices=PLACES, default=PLACES)
    parser.add_argument("--rows", nargs="+", default=["*"], help="patterns of family/place/setting")
    parser.add_argument("--trainer", nargs="+", type=mode, default=[], metavar="MODE")
    parser.add_argument("--only-trainer", action="store_true", help="none of ours")
    parser.add_argument("--warm", type=int, default=8, help="rows that compile at once; 0: none")
    parser.add_argument("--compile-only", action="store_true", help="measure nothing")
    parser.add_argument("--steps", type=int, default=4, help="measured in each row")
    parser.add_argument("--profile", action="store_true", help="kernels by class, of two steps")
    parser.add_argument("--no-limits", action="store_true", help="measure no limits")
    parser.add_argument("--memory-only", action="store_true", help="many rows at once, no times")
    return parser.parse_args()


def mode(text: str) -> str:
    """A mode of Trainer; raises ValueError where there is no such one."""
    if text != PLAIN:
        Setting.parse(f"1-none-{text}")
    return text


def rows_of(given: argparse.Namespace) -> list[Row]:
    """What was asked for: the first setting of all families, then the second of all."""
    cases = given.settings or [Case.parse(text) for text in SETTINGS]
    if given.device == "cpu":
        cases = [case.tiny() for case in cases]
    asked = itertools.product(given.places, cases, given.families)
    ours = [Row(family, world, case) for world, case, family in asked if not given.only_trainer]
    found = [*ours, *trainer_rows(given.families, cases, given.trainer)]
    return [row for row in found if any(fnmatch(str(row), pattern) for pattern in given.rows)]


def trainer_rows(families: Sequence[str], cases: Sequence[Case], modes: Sequence[str]) -> list[Row]:
    """Trainer recomputes whole blocks or nothing, and runs on one GPU here."""
    possible = [case for case in cases if case.setting.recompute in ("none", "full")]
    asked = itertools.product(modes, possible, families)
    return [Row(family, 1, case, mode) for mode, case, family in asked]


if __name__ == "__main__":
    main()
