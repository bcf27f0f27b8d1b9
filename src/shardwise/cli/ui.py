"""`shardwise ui`: a page over runs, for a browser of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.find_run import RUNS_DIR, run_or_name
from shardwise.errors import UserError


def ui(
    runs: Annotated[
        Path,
        typer.Argument(
            help="A directory of runs, or one run or its name.",
            parser=run_or_name,
            metavar="RUNS",
        ),
    ] = RUNS_DIR,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="An address of this machine alone, such as ::1.")
    ] = "127.0.0.1",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Serve a page over runs: live curves beside the plan, gates, logs, checkpoints.

    It shows every run of the directory, follows those that go on, and compares several. Only
    this machine reaches it, and only with the token in the printed address. Ctrl-C ends it.

    \b
    Examples:
      shardwise ui
      shardwise ui runs/
      shardwise ui demo --port 8123
    Next: open the printed address in a browser
    """
    from shardwise.ui.server import open_server

    if not runs.is_dir():
        raise UserError(
            f"there is no directory {runs}",
            why="the page shows the runs of a directory",
            fix="name the directory that holds your runs, or start one: shardwise train run.yaml",
        )
    server = open_server(runs, port, every, host)
    tunnel = f"{server.server_port}:127.0.0.1:{server.server_port}"
    typer.echo(f"serving {runs} at {server.url}")
    typer.echo(f"Ctrl-C ends it; from another machine, first: ssh -L {tunnel} THIS_MACHINE")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("the page is no longer served")
    finally:
        server.server_close()
