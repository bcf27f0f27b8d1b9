"""Run a plan on this machine: start its ranks, watch them, start them again where that helps."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shardwise.checkpoint.store import list_checkpoints
from shardwise.config.plain import dump_yaml
from shardwise.errors import UserError
from shardwise.launch.failure import error_of
from shardwise.launch.last_words import RankTerminal
from shardwise.launch.launcher import is_rank
from shardwise.launch.prepare import validate_machine, validate_sinks
from shardwise.launch.ranks import Ranks
from shardwise.launch.say import say_on_console
from shardwise.launch.supervise import (
    SignalRelay,
    Watchdog,
    announce_restart,
    describe_hang,
    last_step,
    may_restart,
    relayed_signals,
)
from shardwise.lease.lease import Lease
from shardwise.lease.take import hold_run
from shardwise.plan.float8 import validate_torchao
from shardwise.plan.plan import Plan

PLAN_NAME = "plan.json"


def run_plan(plan: Plan) -> Path:
    """Start its ranks and wait for them; returns the run directory.

    Inside torchrun (RANK is set) this process is one rank and starts no others.
    """
    validate_sinks(plan.config)
    validate_torchao(plan.linear.value)
    if is_rank(os.environ):
        _run_as_one_rank(plan)
        return plan.run_dir
    validate_machine(plan.cluster)
    with hold_run(plan.run_dir, say=say_on_console) as lease:
        path = write_run_directory(plan)
        run_supervised(plan, path, lease)
    return plan.run_dir


def write_run_directory(plan: Plan) -> Path:
    """config.yaml and plan.json, before anything starts; returns the path of the plan."""
    path = plan.run_dir / PLAN_NAME
    _validate_checkpoints(plan, path)
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    (plan.run_dir / "config.yaml").write_text(dump_yaml(plan.config), encoding="utf-8")
    plan.save(path)
    return path


def run_supervised(plan: Plan, plan_path: Path, lease: Lease) -> None:
    """Start the ranks; after a death or a hang start them again from the newest good step."""
    restarts = 0
    with relayed_signals() as relay:
        while True:
            step_before = last_step(plan.run_dir)
            try:
                lease.validate()
                start_ranks(plan, plan_path, relay, lease)
                return
            except UserError as error:
                asked_to_stop = relay.number is not None
                if asked_to_stop or not may_restart(error, plan, restarts, step_before):
                    raise
                restarts += 1
                announce_restart(error, plan, restarts)


def start_ranks(plan: Plan, plan_path: Path, relay: SignalRelay, lease: Lease) -> None:
    """One process a device; a failure becomes one error that names the first cause."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as scratch:
        count = plan.cluster.devices_per_node
        ranks = Ranks(count, [str(plan_path)], Path(scratch), lease=lease)
        relay.folder = ranks.heartbeats
        watchdog = Watchdog(ranks.heartbeats, plan.config.train.hang_timeout_s, relay)
        with ranks, watchdog:
            failures = ranks.wait()
        if watchdog.fired:
            raise describe_hang(watchdog, plan.run_dir / "logs")
        if failures:
            raise error_of(failures, plan.run_dir)


def _run_as_one_rank(plan: Plan) -> None:
    from shardwise.launch.worker import run_rank

    with RankTerminal():
        run_rank(plan, prepare=write_run_directory)


def _validate_checkpoints(plan: Plan, path: Path) -> None:
    """What the run directory holds already must be this run's to go on with."""
    found = list_checkpoints(plan.run_dir / "checkpoints")
    if not found:
        return
    if path.exists() and Plan.load(path).hf_config != plan.hf_config:
        raise UserError(
            f"{plan.run_dir} holds checkpoints of another model",
            why="model.name or model.overrides changed since they were written",
            fix="give this run another name",
        )
    if not plan.config.checkpoint.resume:
        raise UserError(
            f"{plan.run_dir} holds checkpoints up to step {found[-1].step}",
            why="checkpoint.resume=false asks for a run from the start, and nothing is overwritten",
            fix="give the run another name, or move the directory away",
        )
