"""`shardwise report`: one HTML page of one run, or of several beside each other."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from shardwise.errors import UserError

RUNS_DIR = Path("runs")
REPORT_NAME = "report.html"
_TRACES = ("plan.json", "events.jsonl")


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, or their names under ./runs.")
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            help="File to write. Unset: report.html in the run directory, or beside them."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Rewrite the page until the runs end.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.5, help="Seconds between two writes of --watch.")
    ] = 5.0,
) -> None:
    """Write one HTML file of what runs did: needs no network, no GPU, and no torch.

    The page shows loss, speed, MFU, memory and step time beside the plan, where the time went,
    checkpoints and restarts on a time line, the plan with its reasons, gates and environment.
    Several runs share the plots. With --watch an open page stays up to date while training goes on.

    \b
    Examples:
      shardwise report runs/demo
      shardwise report demo --watch
      shardwise report runs/a runs/b --to compare.html
    Next: open the file in a browser.
    """
    from shardwise.report.write import validate_target, watch_runs, write_report
    from shardwise.units import format_bytes

    paths = list(dict.fromkeys(map(_find_run, runs)))
    target = _target(paths, to)
    validate_target(target)
    if not watch:
        size = write_report(paths, target)
        typer.echo(f"wrote {target} ({format_bytes(size)})\nnext: open it in a browser")
        return
    typer.echo(f"writing {target} every {every:g} s; open it in a browser; Ctrl-C ends this")
    ended = watch_runs(paths, target, every)
    typer.echo(f"{'the run has ended' if ended else 'stopped watching'}; {target} is up to date")


def _target(paths: list[Path], to: Path | None) -> Path:
    if to is None:
        return (paths[0] if len(paths) == 1 else paths[0].parent) / REPORT_NAME
    return to / REPORT_NAME if to.is_dir() else to


def _find_run(given: Path) -> Path:
    """The directory itself, or the run of that name."""
    candidates = [given, RUNS_DIR / given]
    for path in candidates:
        if any((path / name).exists() for name in _TRACES):
            return path
    if given.is_dir():
        raise UserError(
            f"{given} is not a run directory",
            why=f"it holds neither {' nor '.join(_TRACES)}",
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
