"""The frozen weights under adapters. A checkpoint names them and does not hold them."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.store import Checkpoint
from shardwise.errors import ExitCode, UserError
from shardwise.facts.adapter_sizes import BASE_NAMES
from shardwise.files import free_name
from shardwise.plan.planned import Plan

# What stands before the format of weights that were packed when they were read.
_IN = ", in "


def base_identity(plan: Plan) -> str | None:
    """What tells these weights from others: a hash of their files, or the seed that they come from,
    and their format where it is not the files'. None where nothing is frozen."""
    if plan.decided.adapter == "none":
        return None
    if plan.weights_dir is None:
        read = f"random weights of seed {plan.settings.train.seed}"
    else:
        read = describe_base(Path(plan.weights_dir))
    name = BASE_NAMES.get(plan.settings.adapter.base)
    return read if name is None else f"{read}{_IN}{name}"


def describe_base(place: Path) -> str:
    """The identity of the weights in a directory or file."""
    # Imported on need: it brings torch, which a run without adapters does not need here.
    from shardwise.model.weight_fingerprint import fingerprint_weights

    return f"sha256 {fingerprint_weights(place)}"


def validate_base(found: Checkpoint, plan: Plan) -> None:
    """Raise where a checkpoint of adapters was trained over other weights than the plan's, or where
    one of the two has adapters and the other has none."""
    saved, now = found.manifest.base, base_identity(plan)
    if saved == now:
        return
    another = f"give the run another name: name={free_name(plan.run_dir).name}"
    if saved is None or now is None:
        raise UserError(
            f"{plan.run_dir} holds checkpoints of {_kind(saved)}, and this run trains {_kind(now)}",
            why="adapter.method changed since they were written",
            fix=f"set this back, or {another}",
        )
    raise UserError(
        f"{plan.run_dir} holds adapters that were trained over other weights",
        why=f"step {found.step} was trained over {saved}, and those of this run are {now}",
        fix=f"give it the weights that it was trained over: model.weights_from=DIR, or {another}",
        code=ExitCode.VERIFY_FAILED,
    )


def validate_under(place: Path, saved: str | None) -> None:
    """Raise where a directory or file does not hold the weights that a manifest names, whatever
    format they had in training."""
    if (now := describe_base(place)) != (saved or "").partition(_IN)[0]:
        raise UserError(
            f"{place} does not hold the weights that the adapters were trained over",
            why=f"those were {saved}, and these are {now}",
            fix="name the directory that has them: --base DIR",
            code=ExitCode.VERIFY_FAILED,
        )


def _kind(base: str | None) -> str:
    return "whole models" if base is None else "adapters"
