"""Run a plan on this machine: start its ranks, watch them, and restart them where that helps."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shardwise.checkpoint.resume import validate_resume
from shardwise.errors import UserError
from shardwise.launch.failure import error_of
from shardwise.launch.hang import describe_hang
from shardwise.launch.last_words import RankTerminal, shared_errors
from shardwise.launch.launcher import is_rank
from shardwise.launch.lookout import Lookout
from shardwise.launch.preflight import validate_run
from shardwise.launch.prepare import validate_family, validate_machine
from shardwise.launch.ranks import Ranks
from shardwise.launch.relay import SignalRelay, relayed_signals
from shardwise.launch.say import say_on_console
from shardwise.launch.supervise import announce_restart, last_step, why_final, with_reason
from shardwise.launch.watchdog import Watchdog
from shardwise.lease.lease import Lease
from shardwise.lease.take import hold_run
from shardwise.plan.plan import Plan


def run_plan(plan: Plan) -> Path:
    """Start its ranks and wait for them; returns the run directory.

    Inside torchrun (RANK is set) this process is one rank and starts no others.
    """
    if is_rank(os.environ):
        _run_as_one_rank(plan)
        return plan.run_dir
    _warn(validate_run(plan))
    validate_machine(plan.cluster)
    validate_family(plan)
    with hold_run(plan.run_dir, say=say_on_console) as lease:
        validate_resume(plan)
        run_supervised(plan, lease)
    return plan.run_dir


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


def _run_as_one_rank(plan: Plan) -> None:
    with RankTerminal():
        with shared_errors():
            # This imports torch and transformers, for which an installation may be unfit.
            from shardwise.launch.worker import run_rank

            # Once a node: what one finds is an error of all ranks.
            warnings = validate_run(plan) if os.environ["LOCAL_RANK"] == "0" else []
        _warn(warnings if os.environ["RANK"] == "0" else [])
        run_rank(plan)


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        say_on_console(f"warning: {warning}")
