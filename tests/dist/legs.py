"""Runs in legs: each goes on from the newest checkpoint, and saves where it stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_runs import Settings, Trained, run_steps, start

from shardwise.checkpoint.restore import find_good, restore_checkpoint
from shardwise.checkpoint.save import Progress, Saver


def run_leg(world: int, settings: Settings, root: Path, stop: int) -> Any:
    """Go on from the newest checkpoint under `root` to step `stop`, and save there."""
    session = start(world, settings)
    plan, model, optimizer = session.plan, session.model, session.optimizer
    found = find_good(root, session.mesh.world, verify=True, tell=lambda path, reasons: None)
    if found is not None:
        restore_checkpoint(found, plan, model, optimizer, session.mesh.world)
    result = run_steps(session, range(found.manifest.step if found else 0, stop))
    if stop < plan.config.train.steps:
        saver = Saver(root, plan, model, optimizer, session.mesh.world)
        saver.start(Progress(step=stop, position=stop, tokens=0, loss=None, loss_scale=None))
        (outcome,) = saver.finish()
        saver.close()
        if outcome.error is not None:
            raise RuntimeError(outcome.error)
    return result


def join(first: Trained, second: Trained) -> Trained:
    """Two legs as one run."""
    return Trained(first.losses + second.losses, first.norms + second.norms, second.params)
