"""Room on the disk for the checkpoints of a run, checked before it starts."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.durable_files import stats_below
from shardwise.checkpoint.store import list_checkpoints
from shardwise.errors import ExitCode, UserError
from shardwise.files import free_bytes
from shardwise.plan.checkpoint_size import checkpoint_bytes
from shardwise.plan.planned import Plan
from shardwise.units import format_bytes

_BLOCK_BYTES = 512


def validate_free_space(plan: Plan) -> None:
    """Raise where the disk has no room for the checkpoints that the run will hold at once."""
    root, keep = plan.run_dir / "checkpoints", plan.config.checkpoint.keep
    best = int(plan.settings.checkpoint.keep_best is True)
    found = list_checkpoints(root)
    saves = _saves_to_come(plan, found[-1].step if found else 0)
    # The next checkpoint is written whole before the oldest is removed.
    more = max(min(saves, 1), min(len(found) + saves, keep + best + 1) - len(found))
    size, free = checkpoint_bytes(plan), free_bytes(root)
    if free is None or more * size <= free + _partial_bytes(root):
        return
    fewer = len(found) + (free + _partial_bytes(root)) // size - 1 - best
    keeps = f"set checkpoint.keep={fewer}, " if 1 <= fewer < keep else ""
    raise UserError(
        f"{root} has no room for {more} more checkpoint{'s' * (more > 1)} of "
        f"{format_bytes(size)}: {format_bytes(more * size)} are needed, {format_bytes(free)} are "
        "free",
        why=f"checkpoint.keep={keep} of them are kept{' beside the best' * best}, and the next one "
        "is written before the oldest one is removed",
        fix=f"make room there, {keeps}or choose another place with runs_dir=DIRECTORY",
        code=ExitCode.ENVIRONMENT,
    )


def _saves_to_come(plan: Plan, start: int) -> int:
    """The number of saves after step `start`, by the loop's rule."""
    train, checkpoint = plan.config.train, plan.config.checkpoint
    end = train.steps if train.stop_after is None else train.stop_after
    if end <= start:
        return 0
    between = (end - 1) // checkpoint.every - start // checkpoint.every if checkpoint.every else 0
    last = int(checkpoint.at_end or end < train.steps)
    if plan.settings.checkpoint.keep_best is True:
        # Each evaluation may be the best so far.
        between += (end - 1) // train.eval_every - start // train.eval_every
        last = 1
    return between + last


def _partial_bytes(root: Path) -> int:
    """The bytes of an interrupted save, which the next start frees."""
    files = (found for partial in root.glob("partial-step-*") for found in stats_below(partial))
    return sum(found.st_blocks * _BLOCK_BYTES for found in files)
