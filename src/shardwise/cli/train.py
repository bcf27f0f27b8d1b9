"""`shardwise train`: plan, start the ranks, train; the same command resumes."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.config.load import load_config

if TYPE_CHECKING:
    from shardwise.plan.planned import Plan


def train(
    config: Annotated[str, typer.Argument(help="YAML, TOML or JSON file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes, such as optim.lr=3e-4.", show_default=False)
    ] = None,
) -> None:
    """Train. Starts one rank per device; run the same command again to resume.

    \b
    Examples:
      shardwise train run.yaml
      shardwise train run.yaml train.steps=2000 optim.lr=3e-4
      shardwise torchrun --nproc-per-node 8 run.yaml
    Next: look into the run directory that it names.
    """
    from shardwise.launch.alive import come_alive, show_life
    from shardwise.launch.last_words import shared_errors
    from shardwise.launch.rank_environment import adopt_launcher, is_rank
    from shardwise.launch.this_machine import plan_and_run
    from shardwise.plan.elastic import as_launched
    from shardwise.training.signals import stop_signals_handled_by

    adopt_launcher(os.environ)
    if is_rank(os.environ):
        come_alive(os.environ)
    with shared_errors():
        chosen_config = as_launched(load_config(config, overrides or []))
        if is_rank(os.environ):
            show_life(os.environ, chosen_config.train.hang_timeout_s)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _say_faults_of_node()
    plan = plan_and_run(chosen_config, _show)
    # The run is done and saved, so a request to stop changes nothing now.
    with stop_signals_handled_by(signal.SIG_IGN):
        if os.environ.get("RANK", "0") == "0":
            _conclude(plan, config, overrides or [])


def _say_faults_of_node() -> None:
    """What the doctor finds on this node, before its GPUs are used. It refuses nothing."""
    from shardwise.doctor.examine import is_unfit, look_before_start
    from shardwise.launch.say import say_on_console
    from shardwise.platforms.left_out import leave_out_next_time

    found = look_before_start(os.environ)
    for finding in found:
        check = finding.check
        told = f"{check.level} {check.id}: {check.title}: {finding.evidence}"
        say_on_console(f"{told} (shardwise doctor --explain {check.id})")
    if is_unfit(found) and (node := leave_out_next_time(os.environ)) is not None:
        say_on_console(f"the next start leaves {node} out")


def _show(plan: Plan) -> None:
    """What is planned, before anything starts."""
    from shardwise.cli.show import wrapped
    from shardwise.launch.say import say_on_console
    from shardwise.plan.explain import headline, input_lines

    say_on_console(wrapped(headline(plan)))
    say_on_console(f"run directory: {plan.run_dir} (plan.json gives the reasons)")
    for line in [*map(wrapped, input_lines(plan)), *(f"warning: {text}" for text in plan.warnings)]:
        say_on_console(line)


def _conclude(plan: Plan, config: str, overrides: list[str]) -> None:
    """Judge the run by its gates, write that down, and say how it went."""
    from shardwise.cli.next_steps import early_lines, next_lines
    from shardwise.cli.summary import has_ended_early, last_step, summary_lines
    from shardwise.launch.say import say_on_console
    from shardwise.verify.judge import judge_run, record_gates, validate_passed

    gates = judge_run(plan.run_dir)
    record_gates(plan.run_dir, gates)
    for line in summary_lines(plan, gates):
        say_on_console(line)
    step = last_step(plan)
    if step is not None:
        early = has_ended_early(plan)
        for line in early_lines(plan) if early else next_lines(plan, config, overrides, step):
            say_on_console(line)
    if plan.config.gates.enforce:
        validate_passed(plan.run_dir, gates)
