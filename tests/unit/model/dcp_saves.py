"""Honest DCP checkpoints for tests, and the means to make them dishonest."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

STATE: dict[str, Tensor] = {
    "model.embed.weight": torch.arange(61 * 16.0).view(61, 16),
    "model.norm.weight": torch.arange(16.0).to(torch.bfloat16),
    "model.scale": torch.tensor(3.5),
    "model.steps": torch.arange(6, dtype=torch.int64).view(1, 2, 3),
    "model.none": torch.empty(0, 4),
    "model.turned": torch.arange(24.0).view(4, 6).t(),
    "lm_head.weight": torch.randn(61, 16, generator=torch.Generator().manual_seed(0)),
}


def save_dcp(directory: Path, state: dict[str, Any]) -> Path:
    """As one process saves it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def change_metadata(directory: Path, change: Callable[[Metadata], Any]) -> None:
    """Let `change` spoil the metadata; what it returns, if anything, is written in its place."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(changed if isinstance(changed, bytes) else pickle.dumps(changed or metadata))
