"""What a run directory says of its run: config.yaml and plan.json."""

from __future__ import annotations

from pathlib import Path

from shardwise.config.plain import dump_yaml
from shardwise.files import replace_file
from shardwise.plan.plan import Plan

PLAN_NAME = "plan.json"


def write_run_directory(plan: Plan) -> Path:
    """Write both files once the run is accepted, so that they describe what was trained.

    Returns the path of the plan.
    """
    path = plan.run_dir / PLAN_NAME
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    replace_file(plan.run_dir / "config.yaml", dump_yaml(plan.config).encode())
    plan.save(path)
    return path
