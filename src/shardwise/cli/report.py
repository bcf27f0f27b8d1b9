"""`shardwise report`: one HTML page of one run, or of several beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.find_run import find_run

REPORT_NAME = "report.html"


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
    from shardwise.report.html import REPORT
    from shardwise.report.page_file import validate_target
    from shardwise.report.write import watch_runs, write_report
    from shardwise.units import format_bytes

    paths = list(dict.fromkeys(map(find_run, runs)))
    target = _target(paths, to)
    validate_target(REPORT, target)
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
