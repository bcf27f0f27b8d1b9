"""Train large language models with PyTorch FSDP2, and know beforehand what will happen.

    from shardwise import load_config, choose_plan, train, parallelize

The names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.version import __version__

if TYPE_CHECKING:
    from shardwise.api import train
    from shardwise.config.load import load_config
    from shardwise.launch.prepare import choose_plan
    from shardwise.metrics.callbacks import CheckpointSaved, Evaluated, StepLogged
    from shardwise.parallel.apply import parallelize

__all__ = [
    "CheckpointSaved",
    "Evaluated",
    "StepLogged",
    "__version__",
    "choose_plan",
    "load_config",
    "parallelize",
    "train",
]
_HOMES = {
    "Evaluated": "shardwise.metrics.callbacks",
    "CheckpointSaved": "shardwise.metrics.callbacks",
    "StepLogged": "shardwise.metrics.callbacks",
    "choose_plan": "shardwise.launch.prepare",
    "load_config": "shardwise.config.load",
    "parallelize": "shardwise.parallel.apply",
    "train": "shardwise.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
