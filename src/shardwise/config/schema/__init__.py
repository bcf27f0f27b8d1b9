"""What a user may say: one frozen dataclass per section, a docstring under every field.

The docstrings are the reference: `shardwise config schema` and docs/configuration.md print them.
`auto` means that the planner decides and gives its reason.
"""

from __future__ import annotations

from shardwise.config.schema.adapter import ALL_LINEAR, AdapterConfig
from shardwise.config.schema.budget import MemoryConfig, PrecisionConfig
from shardwise.config.schema.diloco import DilocoConfig
from shardwise.config.schema.kubernetes import KubernetesConfig
from shardwise.config.schema.model import DataConfig, ModelConfig
from shardwise.config.schema.place import ClusterConfig, MeshConfig, ShardConfig
from shardwise.config.schema.preference import USUAL_BETA, WITH_REFERENCE, PreferenceConfig
from shardwise.config.schema.record import CheckpointConfig, GatesConfig, ObserveConfig
from shardwise.config.schema.run import RunConfig
from shardwise.config.schema.scheduler import LaunchConfig
from shardwise.config.schema.skypilot import SkyPilotConfig
from shardwise.config.schema.training import OptimConfig, TrainConfig
from shardwise.config.schema.words import FLOAT8_FORMATS, FROM_STRING, Auto, DtypeName, Strategy

__all__ = [
    "ALL_LINEAR",
    "FLOAT8_FORMATS",
    "FROM_STRING",
    "USUAL_BETA",
    "WITH_REFERENCE",
    "AdapterConfig",
    "Auto",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "DilocoConfig",
    "DtypeName",
    "GatesConfig",
    "KubernetesConfig",
    "LaunchConfig",
    "MemoryConfig",
    "MeshConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimConfig",
    "PrecisionConfig",
    "PreferenceConfig",
    "RunConfig",
    "ShardConfig",
    "SkyPilotConfig",
    "Strategy",
    "TrainConfig",
]
