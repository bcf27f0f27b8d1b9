"""`shardwise observe`: the files that make Prometheus and Grafana watch runs."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from shardwise.errors import UserError
from shardwise.metrics.monitoring.scrape import DEFAULT_PORT, EVERY_S, Place

app = typer.Typer(
    name="observe",
    help="Alerts, a dashboard and a scrape configuration for runs that serve /metrics.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
# Of the shortest window, 5 minutes, that is 0.6 seconds; of the longest, 6 hours, a week and more.
MIN_SCALE, MAX_SCALE = 0.002, 30.0
To = Annotated[Path | None, typer.Option("--to", help="The file to write; unset: stdout.")]


@app.command("rules")
def write_rules(
    scale: Annotated[
        float,
        typer.Option(
            help="Multiply every window and waiting time: 0.1 compares with the last 6 minutes "
            "instead of the last hour, for short runs."
        ),
    ] = 1.0,
    to: To = None,
) -> None:
    """Write Prometheus recording rules and alerts.

    \b
    Examples:
      shardwise observe rules --to rules.yaml
      shardwise observe rules --scale 0.1 --to rules.yaml
    Next: promtool check rules rules.yaml
    """
    from shardwise.metrics.monitoring.alert_rules import rules_text

    if not MIN_SCALE <= scale <= MAX_SCALE:
        raise UserError(
            f"--scale {scale:g} is not between {MIN_SCALE:g} and {MAX_SCALE:g}",
            why="a window must hold several scrapes, and Prometheus keeps its data for days only",
            fix="write --scale 1 for runs of days, or --scale 0.1 for runs of an hour",
        )
    _write(rules_text(scale), to)


@app.command("dashboard")
def write_dashboard(to: To = None) -> None:
    """Write a Grafana dashboard: training, speed, safety and what DCGM says of the GPUs.

    \b
    Example:
      shardwise observe dashboard --to shardwise.json
    Next: import the file in Grafana, Dashboards, New, Import
    """
    from shardwise.metrics.monitoring.dashboard import dashboard_text

    _write(dashboard_text(), to)


@app.command("scrape")
def write_scrape(
    on: Annotated[Place, typer.Option(help="How runs are found: static, slurm or kubernetes.")] = (
        "static"
    ),
    nodes: Annotated[
        list[str] | None,
        typer.Option("--nodes", help="Hosts, or a Slurm list such as gpu[01-04]; may be repeated."),
    ] = None,
    port: Annotated[int, typer.Option(help="observe.prometheus_port of the runs.")] = DEFAULT_PORT,
    rules: Annotated[str, typer.Option(help="The rules file to name.")] = "rules.yaml",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two scrapes.")] = EVERY_S,
    to: To = None,
) -> None:
    """Write prometheus.yml: where the endpoints of runs and of DCGM are.

    \b
    Examples:
      shardwise observe scrape --to prometheus.yml
      shardwise observe scrape --nodes host-a,host-b
      shardwise observe scrape --on slurm --nodes "gpu[01-04]"
      shardwise observe scrape --on kubernetes
    Next: promtool check config prometheus.yml
    """
    from shardwise.metrics.monitoring.scrape import scrape_text

    if on == "kubernetes" and nodes:
        raise UserError(
            "--nodes has no meaning with --on kubernetes",
            why="pods are found by their label",
            fix="leave --nodes out, or write --on static",
        )
    _write(scrape_text(on, nodes or [], port, rules, every), to)


def _write(text: str, to: Path | None) -> None:
    """Write to a file, replacing what an earlier call wrote there, or to stdout."""
    if to is None:
        typer.echo(text, nl=False)
        return
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{to} cannot be written: {error.strerror}",
            fix="write --to FILE in a directory that you may write to"
            if to.parent.is_dir()
            else f"mkdir -p {quote(str(to.parent))}",
        ) from error
    typer.echo(f"wrote {to}", err=True)
