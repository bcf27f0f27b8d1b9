"""Commands that are useful after a run, spelled so that they work where the run was started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import join, quote

from shardwise.config.load import load_config
from shardwise.config.schema import TrainConfig
from shardwise.files import free_name
from shardwise.plan.planned import Plan

_EXAMPLE = "llama-3.1-8b-8xh100"


def next_lines(plan: Plan, config: str, overrides: Sequence[str], step: int) -> Iterator[str]:
    """Commands after a run of `config` with `overrides` that ended at `step`."""
    again = f"shardwise train {join([config, *_without_stop(config, overrides)])}"
    if "RANK" in os.environ:
        again = "the same torchrun command"
        if plan.config.train.stop_after is not None:
            again += " with train.stop_after=null"
    if step < plan.config.train.steps:
        yield f"next: {again}   (goes on at step {step})"
        return
    yield f"next: shardwise report {quote(str(plan.run_dir))}   (plots, gates, the plan)"
    if "RANK" not in os.environ:
        name = free_name(plan.run_dir).name
        longer = [f"name={name}", _twice(plan.config.train)]
        yield f"      {again} {join(longer)}   (twice as long)"
    example = quote(str(free_name(Path(f"{_EXAMPLE}.yaml"))))
    yield f"      shardwise config cp {_EXAMPLE} {example}   (a plan needs no GPU)"
    yield "      shardwise config ls   (models and examples)"


def early_lines(plan: Plan) -> Iterator[str]:
    """Commands after a run that ended because its held-out loss fell no more."""
    run = quote(str(plan.run_dir))
    yield f"next: shardwise export {run} --to exported --best   (the best step as a model)"
    yield f"      shardwise report {run}   (plots, gates, the plan)"


def _twice(train: TrainConfig) -> str:
    if train.epochs is not None:
        return f"train.epochs={2 * train.epochs:g}"
    return f"train.steps={2 * train.steps}"


def _without_stop(config: str, overrides: Sequence[str]) -> list[str]:
    """The user's changes, without a stop before the end: not here, and not in the file."""
    kept = [word for word in overrides if not word.startswith("train.stop_after=")]
    stops = load_config(config, kept).train.stop_after is not None
    return [*kept, "train.stop_after=null"] if stops else kept
