"""Start the ranks of a plan on this machine through torch's elastic agent (torchrun's engine)."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from pathlib import Path

from shardwise.config.plain import dump_yaml
from shardwise.config.schema import RunConfig
from shardwise.errors import ExitCode, UserError
from shardwise.launch.prepare import choose_plan, fetch_weights, validate_machine
from shardwise.plan.plan import Plan

PLAN_NAME = "plan.json"


def train(config: RunConfig) -> Path:
    """Plan, start the ranks and wait for them; returns the run directory.

    Inside torchrun (RANK is set) this process is one rank and starts no others.
    """
    fetch_weights(config)
    plan = choose_plan(config)
    return run_plan(plan)


def run_plan(plan: Plan) -> Path:
    """Run an already chosen plan."""
    if "RANK" in os.environ:
        _run_as_one_rank(plan)
        return plan.run_dir
    validate_machine(plan.cluster)
    path = write_run_directory(plan)
    start_ranks(plan, path)
    return plan.run_dir


def write_run_directory(plan: Plan) -> Path:
    """config.yaml and plan.json, before anything starts; returns the path of the plan."""
    path = plan.run_dir / PLAN_NAME
    _validate_same_model(plan, path)
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    (plan.run_dir / "config.yaml").write_text(dump_yaml(plan.config), encoding="utf-8")
    plan.save(path)
    return path


def start_ranks(plan: Plan, plan_path: Path) -> None:
    """One process a device; a failure becomes one error that names the first cause."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from shardwise.launch.failure import error_of

    # Its own report of a failure is long and names no cause; ours follows.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    ranks = plan.cluster.devices_per_node
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # Segments that grow leave fewer holes than fixed blocks: less reserved memory at the peak.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with tempfile.TemporaryDirectory() as scratch:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        command = ["-u", "-m", "shardwise.launch.worker", str(plan_path)]
        try:
            elastic_launch(config, entrypoint=sys.executable)(*command)
        except ChildFailedError as error:
            raise error_of(error, plan.run_dir) from None
        except SignalException as signal:
            raise UserError(
                f"stopped by {signal.sigval.name}",
                fix="the same command goes on from the newest checkpoint",
                code=ExitCode.WORKER_DIED,
            ) from None


def _run_as_one_rank(plan: Plan) -> None:
    from shardwise.launch.worker import run_rank

    if int(os.environ["RANK"]) == 0:
        write_run_directory(plan)
    run_rank(plan)


def _validate_same_model(plan: Plan, path: Path) -> None:
    """A run directory belongs to one model; another one must not be mixed into its checkpoints."""
    has_checkpoints = any((plan.run_dir / "checkpoints").glob("step-*"))
    if path.exists() and has_checkpoints and Plan.load(path).hf_config != plan.hf_config:
        raise UserError(
            f"{plan.run_dir} holds checkpoints of another model",
            why="model.name or model.overrides changed since they were written",
            fix="give this run another name",
        )
