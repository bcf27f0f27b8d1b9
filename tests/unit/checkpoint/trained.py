"""Real checkpoints of a training state, saved by this process alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.outcome import SaveOutcome
from shardwise.checkpoint.save import Progress, Saver
from shardwise.config.plain import config_from_dict
from shardwise.launch.prepare import choose_plan
from shardwise.parallel.mesh import build_mesh
from shardwise.training.session import Session, build_session

TINY: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def start_session(runs: Path, name: str = "run", **sections: Any) -> Session:
    """A model of this process; its run directory lies in `runs`."""
    config = config_from_dict(
        {
            "name": name,
            "runs_dir": str(runs),
            "model": {"overrides": TINY},
            "data": {"source": "synthetic", "seq_len": 8},
            "cluster": {"name": "1xCPU"},
            "train": {"global_batch": 2},
            **sections,
        }
    )
    plan = choose_plan(config, environ={})
    return build_session(plan, build_mesh(plan), lambda text: None)


def open_saver(session: Session, root: Path | None = None) -> Saver:
    place = root or session.plan.run_dir / "checkpoints"
    return Saver(place, session.plan, session.model, session.optimizer, session.mesh.world)


def save(session: Session, saver: Saver, step: int, **options: Any) -> SaveOutcome:
    """One update, and a checkpoint of it."""
    for param in session.model.parameters():
        param.grad = torch.full_like(param, step)
    session.optimizer.step()
    progress = Progress(step=step, position=step, tokens=0, loss=None, loss_scale=None)
    saver.start(progress, **options)
    (outcome,) = saver.finish()
    return outcome
