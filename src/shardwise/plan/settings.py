"""The user's settings as ranks read them: the plan's decisions replace every `auto`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from shardwise.config.schema import (
    USUAL_BETA,
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    DilocoConfig,
    GatesConfig,
    MemoryConfig,
    ModelConfig,
    ObserveConfig,
    OptimConfig,
    PrecisionConfig,
    PreferenceConfig,
    RunConfig,
    ShardConfig,
    TrainConfig,
)
from shardwise.config.schema_text import value_at
from shardwise.plan.decisions import FLOAT8_BASE, UNSAID, Decisions, setting_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run's settings, all settled. The mesh is in the decisions, the cluster in the plan."""

    name: str
    runs_dir: str
    model: ModelConfig
    adapter: AdapterConfig
    data: DataConfig
    preference: PreferenceConfig
    diloco: DilocoConfig
    shard: ShardConfig
    precision: PrecisionConfig
    memory: MemoryConfig
    optim: OptimConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    gates: GatesConfig
    observe: ObserveConfig


def settle(config: RunConfig, decided: Decisions) -> Settings:
    """Put the plan's decision wherever the user has left one open.

    How a float8 base multiplies is no value of a setting, so `precision.linear` stays open there.
    """
    for path, value in _settled(config, decided):
        section, _, name = path.partition(".")
        if value_at(config, path) == "auto" and value not in (UNSAID, FLOAT8_BASE):
            changed = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: changed})
    return Settings(**{item.name: getattr(config, item.name) for item in fields(Settings)})


def _settled(config: RunConfig, decided: Decisions) -> Iterator[tuple[str, Any]]:
    for name, path in setting_paths().items():
        yield path, getattr(decided, name)
    yield "data.tokenizer", decided.tokenizer
    yield "model.weights", "random" if decided.weights == "random" else "pretrained"
    yield "shard.all_gather_limit", 1 + max(decided.forward_prefetch, decided.backward_prefetch)
    yield "preference.beta", USUAL_BETA[config.preference.objective]
    yield "optim.decay_steps", config.train.steps // 10
    yield "checkpoint.keep_best", config.train.patience > 0
