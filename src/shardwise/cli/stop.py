"""`shardwise stop` and `shardwise exclude`: what a user asks of a job that is under way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.find_run import find_run
from shardwise.cli.status import LAUNCHED, Run
from shardwise.errors import UserError

# A rank is named after nine late steps of ten. So many reports in a row name it again.
_AGAIN = 3


def stop(run: Run) -> None:
    """Ask a run to save and to end. A job that still waits is cancelled.

    It returns at once; `shardwise status` shows when the run has ended. The command that started
    it goes on from what it saved.

    \b
    Example:
      shardwise stop runs/demo
    Next: shardwise status RUN
    """
    from shardwise.platforms.job_of_run import stop_job

    found = stop_job(find_run(run, LAUNCHED))
    if found.state in ("waiting", "running"):
        typer.echo(f"asked to stop: {found.words}")
    else:
        typer.echo(f"there is nothing to stop: {found.words}")


def exclude(
    run: Run,
    nodes: Annotated[
        list[str] | None,
        typer.Argument(help="Names of nodes, as the platform has them.", show_default=False),
    ] = None,
    late: Annotated[
        bool, typer.Option("--late", help="The node that the others wait for, if there is one.")
    ] = False,
) -> None:
    """Keep nodes out of the next start of a submitted run.

    The job that runs keeps its nodes; after a stop, a failure or a time limit it starts without
    them. With `launch.elastic` it goes on with fewer, and the job itself leaves out a node that was
    late in its last reports.

    \b
    Examples:
      shardwise exclude runs/demo node7
      shardwise exclude runs/demo --late
    Next: shardwise status RUN
    """
    from shardwise.platforms.job_of_run import exclude_nodes

    run_dir = find_run(run, LAUNCHED)
    names = [*(nodes or []), *(_late_nodes(run_dir) if late else [])]
    if not names and late:
        typer.echo("no node is late")
        return
    if not names:
        raise UserError("no node is named", fix="name nodes, or write --late")
    submission = exclude_nodes(run_dir, names)
    typer.echo(f"{submission.platform} job {submission.id} starts next without {', '.join(names)}")


def _late_nodes(run_dir: Path) -> list[str]:
    """The node of the rank that held the others up in the last reports, again and again."""
    from shardwise.cli.status import late_rank
    from shardwise.report.collect import collect_run

    found = late_rank(collect_run(run_dir))
    if found is None or found["node"] is None or found["reports"] < _AGAIN:
        return []
    return [str(found["node"])]
