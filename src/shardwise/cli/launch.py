"""`shardwise launch`: the files of a platform, with reasons, and their submission."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.config.load import load_config
from shardwise.errors import ExitCode, UserError
from shardwise.platforms.known import PLATFORMS, find_launcher
from shardwise.platforms.launcher import Launcher, Rendered, write_files
from shardwise.platforms.submission import find_submission, submission_of

if TYPE_CHECKING:
    from shardwise.plan.planned import Plan
    from shardwise.platforms.job import Job

_ON = ", ".join(f"{platform.name} ({platform.about})" for platform in PLATFORMS)


def launch(
    config: Annotated[str, typer.Argument(help="YAML, TOML or JSON file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes, such as optim.lr=3e-4.", show_default=False)
    ] = None,
    on: Annotated[str, typer.Option("--on", help=f"The platform: {_ON}.")] = "local",
    submit: Annotated[bool, typer.Option("--submit", help="Submit the files too.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The directory for the files. [default: RUN/launch]")
    ] = None,
) -> None:
    """Write the files of a platform for a run, with a reason above each setting.

    With --submit the platform's own client submits them. What the platform needs besides, such as
    a partition, stands in the section `launch` of the configuration.

    \b
    Examples:
      shardwise launch run.yaml
      shardwise launch run.yaml --on local --submit
      shardwise launch run.yaml --on slurm --submit \\
        launch.options=[--partition=gpu]
      shardwise launch run.yaml --on jobset kubernetes.queue=gpus
      shardwise launch run.yaml --out files optim.lr=1e-5
    Next: read the files, then add --submit
    """
    from shardwise.launch.prepare import choose_plan
    from shardwise.platforms.job import build_job

    platform = find_launcher(on)
    # The ranks of another launcher, in which this command may run, are no part of the plan.
    plan = choose_plan(load_config(config, overrides or []), environ={})
    job = build_job(plan, command=_command(), least_nodes=_least_nodes(plan), files_dir=out)
    rendered = platform.render(job)
    if submit:
        _validate_idle(job)
    write_files(rendered)
    _show(rendered, plan)
    if submit:
        submission_of(job, on, platform.submit(job, rendered), time.time()).save()
    _conclude(platform, job, submitted=submit)


def _command() -> str:
    """The `shardwise` beside this Python, or as it was called: nodes have no PATH of ours."""
    beside = Path(sys.executable).with_name("shardwise")
    return str(beside if beside.exists() else Path(sys.argv[0]).absolute())


def _least_nodes(plan: Plan) -> int:
    """The fewest nodes down to which every number of them has a plan."""
    from shardwise.launch.prepare import choose_plan
    from shardwise.plan.elastic import with_nodes

    least = plan.cluster.num_nodes
    if not plan.config.launch.elastic:
        return least
    train = replace(plan.config.train, global_batch=plan.decided.global_batch)
    pinned = replace(plan.config, train=train)
    while least > 1:
        try:
            choose_plan(with_nodes(pinned, least - 1), environ={})
        except UserError:
            break
        least -= 1
    return least


def _validate_idle(job: Job) -> None:
    """Raise where the run is waiting or running already."""
    before, place = find_submission(job.run_dir), quote(str(job.run_dir))
    if before is None:
        return
    found = find_launcher(before.platform).status(before)
    if found.state in ("waiting", "running"):
        raise UserError(
            f"the run {job.name} was submitted before: {before.platform} job {before.id}, "
            f"{found.words}",
            why="two jobs cannot write to one run directory",
            fix=f"stop that one first: `shardwise stop {place}`, or give this run another name: "
            f"name={job.name}-2",
            code=ExitCode.ENVIRONMENT,
        )


def _show(rendered: Rendered, plan: Plan) -> None:
    """The file that is submitted, as it is, and where the others are."""
    from shardwise.cli.show import wrapped
    from shardwise.plan.explain import headline

    typer.echo(wrapped(headline(plan)))
    for warning in plan.warnings:
        typer.echo(f"warning: {warning}")
    typer.echo(f"--- {rendered.main.path}")
    typer.echo(rendered.main.text.rstrip("\n"))
    for file in rendered.files[1:]:
        typer.echo(f"--- {file.path} ({len(file.text.splitlines())} lines)")
    typer.echo("---")


def _conclude(platform: Launcher, job: Job, *, submitted: bool) -> None:
    if not submitted:
        typer.echo("nothing is submitted; next: the same command with --submit", err=True)
        return
    found = find_submission(job.run_dir)
    number = "" if found is None else found.id
    typer.echo(f"submitted: {platform.name} job {number}; run directory {job.run_dir}")
    typer.echo(
        f"next: shardwise status {quote(str(job.run_dir))}   (or logs, attach, stop)", err=True
    )
