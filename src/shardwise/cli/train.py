"""`shardwise train`: plan, start the ranks, train; the same command resumes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.config.load import load_config

if TYPE_CHECKING:
    from shardwise.plan.plan import Plan


def train(
    config: Annotated[str, typer.Argument(help="YAML, TOML or JSON file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes, such as optim.lr=3e-4.", show_default=False)
    ] = None,
) -> None:
    """Train. Starts one rank a device; run the same command again to resume.

    \b
    Examples:
      shardwise train run.yaml
      shardwise train run.yaml train.steps=2000 optim.lr=3e-4
      shardwise torchrun --nproc-per-node 8 run.yaml
    Next: look into the run directory that it names.
    """
    from shardwise.cli.show import show_warnings
    from shardwise.launch.last_words import shared_errors
    from shardwise.launch.launcher import adopt_launcher
    from shardwise.launch.local import run_plan
    from shardwise.launch.prepare import choose_plan, fetch_weights
    from shardwise.plan.explain import headline, input_lines

    adopt_launcher(os.environ)
    with shared_errors():
        chosen_config = load_config(config, overrides or [])
        fetch_weights(chosen_config)
        plan = choose_plan(chosen_config)
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        typer.echo(headline(plan))
        typer.echo(f"run directory: {plan.run_dir} (plan.json gives the reasons)")
        for line in input_lines(plan):
            typer.echo(line)
        show_warnings(plan)
    run_plan(plan)
    if is_first:
        _conclude(plan, config, overrides or [])


def _conclude(plan: Plan, config: str, overrides: list[str]) -> None:
    """Judge the run by its gates, write that down, and say how it went."""
    from shardwise.cli.next_steps import next_lines
    from shardwise.cli.summary import last_step, summary_lines
    from shardwise.verify.judge import judge_run, record_gates, validate_passed

    gates = judge_run(plan.run_dir)
    record_gates(plan.run_dir, gates)
    for line in summary_lines(plan, gates):
        typer.echo(line)
    step = last_step(plan)
    if step is not None:
        for line in next_lines(plan, config, overrides, step):
            typer.echo(line)
    if plan.config.gates.enforce:
        validate_passed(plan.run_dir, gates)
