"""What a run directory says of its run: config.yaml and plan.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardwise.config.plain import dump_yaml
from shardwise.config.schema import RunConfig, TrainConfig
from shardwise.files import replace_file
from shardwise.plan.planned import Plan

PLAN_NAME = "plan.json"


def write_run_directory(plan: Plan) -> Path:
    """Write both files once the run is accepted, so that they describe what was trained.

    Returns the path of the plan.
    """
    path = plan.run_dir / PLAN_NAME
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    replace_file(plan.run_dir / "config.yaml", dump_yaml(_as_said(plan.config)).encode())
    plan.save(path)
    return path


def _as_said(config: RunConfig) -> RunConfig:
    """The configuration without the steps that its epochs became: a file may say one of them."""
    if config.train.epochs is None:
        return config
    return replace(config, train=replace(config.train, steps=TrainConfig().steps))
