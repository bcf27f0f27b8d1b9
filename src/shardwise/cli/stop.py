"""`shardwise stop` and `shardwise exclude`: what a user asks of a job that is under way."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.find_run import find_run
from shardwise.cli.status import LAUNCHED, Run


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
    nodes: Annotated[list[str], typer.Argument(help="Names of nodes, as the platform has them.")],
) -> None:
    """Keep nodes out of the next start of a submitted run.

    The job that runs keeps its nodes; after a stop, a failure or a time limit it starts without
    them. With `launch.elastic` it goes on with fewer.

    \b
    Example:
      shardwise exclude runs/demo node7
    Next: shardwise status RUN
    """
    from shardwise.platforms.job_of_run import exclude_nodes

    submission = exclude_nodes(find_run(run, LAUNCHED), nodes)
    typer.echo(f"{submission.platform} job {submission.id} starts next without {', '.join(nodes)}")
