"""Run a plan on this machine: start its ranks, watch them, and restart them where that helps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.may_resume import validate_resume
from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.launch.failure import error_of
from shardwise.launch.hang import describe_hang
from shardwise.launch.last_words import RankTerminal, shared_errors
from shardwise.launch.lookout import Lookout
from shardwise.launch.preflight import validate_run
from shardwise.launch.prepare import choose_plan, fetch_weights, validate_family, validate_machine
from shardwise.launch.rank_environment import is_rank
from shardwise.launch.ranks import Ranks
from shardwise.launch.relay import SignalRelay, relayed_signals
from shardwise.launch.say import say_on_console
from shardwise.launch.supervise import announce_restart, last_step, why_final, with_reason
from shardwise.launch.watchdog import Watchdog
from shardwise.lease.lease import Lease
from shardwise.lease.take import hold_run
from shardwise.plan.planned import Plan
from shardwise.plan.run_directory import PLAN_NAME


def plan_and_run(config: RunConfig, show: Callable[[Plan], None] = lambda plan: None) -> Plan:
    """Plan, start the ranks and wait for them; returns the plan.

    Inside torchrun or srun (RANK is set) this process is one rank and starts no others. There the
    first rank plans for all. `show` is called where the plan is made.
    """
    with shared_errors():
        fetch_weights(config)
        plan = choose_plan(config) if os.environ.get("RANK", "0") == "0" else None
    if plan is not None:
        show(plan)
    if plan is None or is_rank(os.environ):
        trained = _run_as_one_rank(config, plan)
    else:
        run_plan(plan)
        trained = plan
    if trained.config.train.epochs is None or os.environ.get("RANK", "0") != "0":
        return trained
    # Ranks have counted the steps, and their first one has written them down.
    return Plan.load(trained.run_dir / PLAN_NAME)


def run_plan(plan: Plan) -> None:
    """Start its ranks on this machine and wait for them."""
    _warn(validate_run(plan))
    validate_machine(plan.cluster)
    validate_family(plan)
    with hold_run(plan.run_dir, say=say_on_console) as lease:
        validate_resume(plan)
        run_supervised(plan, lease)


def run_supervised(plan: Plan, lease: Lease) -> None:
    """Start the ranks. After a death or a hang start them again from the newest good step."""
    restarts = 0
    with relayed_signals() as relay:
        while True:
            step_before = last_step(plan.run_dir)
            try:
                start_ranks(plan, relay, lease)
                return
            except UserError as error:
                if relay.number is not None:
                    raise relay.explain(error) from error
                reason = why_final(error, plan, restarts, step_before)
                if reason is not None:
                    raise with_reason(error, reason) from error
                lease.validate()
                restarts += 1
                announce_restart(error, plan, restarts)


def start_ranks(plan: Plan, relay: SignalRelay, lease: Lease) -> None:
    """One process for each device. A failure becomes one error that names the first cause.

    The first rank writes plan.json into the run directory, once the run is accepted.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as scratch:
        plan_path = Path(scratch) / "plan.json"
        plan.save(plan_path)
        count = plan.cluster.devices_per_node
        ranks = Ranks(count, [str(plan_path)], Path(scratch), lease=lease)
        lookout = Lookout(ranks.heartbeats, launcher=os.getpid())
        timeout_s = plan.config.train.hang_timeout_s
        watchdog = Watchdog(lookout, say_on_console, timeout_s=timeout_s, relay=relay)
        with ranks, watchdog:
            failures = ranks.wait()
        if watchdog.hang is not None:
            raise describe_hang(watchdog.hang)
        if failures:
            raise error_of(failures, plan.run_dir)


def _run_as_one_rank(config: RunConfig, plan: Plan | None) -> Plan:
    with RankTerminal():
        with shared_errors():
            # This imports torch and transformers, for which an installation may be unfit.
            from shardwise.launch.one_plan import plan_of_first_rank
            from shardwise.launch.worker import run_rank

            # Other nodes look at their own files when they know the plan.
            warnings = validate_run(plan) if plan is not None else []
        _warn(warnings)
        return run_rank(plan_of_first_rank(config, plan), config.train.hang_timeout_s)


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        say_on_console(f"warning: {warning}")
