"""`shardwise plan`: what would happen, and why; starts nothing."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shardwise.cli.show import show_plan
from shardwise.config.load import load_config


def plan(
    config: Annotated[str, typer.Argument(help="YAML, TOML or JSON file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes, such as optim.lr=3e-4.", show_default=False)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Plan for this cluster instead, such as 4x8xH100.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plan.json.")] = False,
) -> None:
    """Print the plan of a run with a reason for every choice. No GPU needed.

    \b
    Examples:
      shardwise plan run.yaml
      shardwise plan run.yaml --cluster 4x8xH100 train.global_batch=512
    Next: shardwise train run.yaml
    """
    changes = [*(overrides or []), *([f"cluster.name={cluster}"] if cluster else [])]
    from shardwise.launch.prepare import choose_plan

    chosen = choose_plan(load_config(config, changes))
    if as_json:
        typer.echo(json.dumps(chosen.to_dict(), indent=2))
    else:
        show_plan(chosen)
