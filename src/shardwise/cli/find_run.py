"""The run directory that a user means."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from shardwise.errors import UserError

RUNS_DIR = Path("runs")
TRACES = ("plan.json", "events.jsonl")


def run_or_name(given: str) -> Path:
    """The path as it is given, or the run of that name under ./runs where nothing is there."""
    path, named = Path(given), RUNS_DIR / given
    return named if not path.exists() and named.exists() else path


def find_run(given: Path, traces: Sequence[str] = TRACES) -> Path:
    """The directory itself, or the run of that name under ./runs. One of `traces` must be there."""
    candidates = [given, RUNS_DIR / given]
    for path in candidates:
        if any((path / name).exists() for name in traces):
            return path
    if given.is_dir():
        raise UserError(
            f"{given} is not a run directory",
            why=f"it holds neither {' nor '.join(traces)}",
            fix="name the directory that `shardwise train` printed, such as runs/demo",
        )
    raise UserError(f"there is no run {given}", fix=_suggestion(given))


def _suggestion(given: Path) -> str:
    known = [path.parent.name for path in sorted(RUNS_DIR.glob("*/plan.json"))]
    near = get_close_matches(given.name, known, n=3, cutoff=0.4)
    if near:
        return f"did you mean {' or '.join(str(RUNS_DIR / name) for name in near)}?"
    if known:
        return f"there are {', '.join(str(RUNS_DIR / name) for name in known[:10])}"
    return "name the directory that `shardwise train` printed, such as runs/demo"
