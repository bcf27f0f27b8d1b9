"""The Plan: every decision about a run, each with its reason. Workers read it and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from shardwise.config.plain import config_from_dict, config_to_dict
from shardwise.config.schema import RunConfig
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec

T = TypeVar("T")
Source = Literal["user", "rule", "search", "measured"]


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """A decided value, why it was decided so, and who decided."""

    value: T
    why: str
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Expected bytes on one rank at the peak of a step, by what they hold."""

    params: int
    grads: int
    optimizer: int
    gathered: int
    buffers: int
    activations: int
    loss: int
    overhead: int

    @property
    def states(self) -> int:
        """What the sharded model itself takes; exact, whatever the batch."""
        return self.params + self.grads + self.optimizer

    @property
    def total(self) -> int:
        """The whole peak."""
        return sum(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will happen. Saved as plan.json in the run directory."""

    config: RunConfig
    model: ModelSpec
    hf_config: dict[str, Any]
    model_dir: str | None
    weights_dir: str | None
    cluster: ClusterSpec
    memory: MemoryEstimate
    warnings: list[str]

    strategy: Choice[str]
    replicate: Choice[int]
    shard: Choice[int]
    reshard_after_forward: Choice[bool | int]
    forward_prefetch: Choice[int]
    backward_prefetch: Choice[int]
    param_dtype: Choice[str]
    reduce_dtype: Choice[str]
    output_dtype: Choice[str | None]
    checkpoint_activations: Choice[str | float]
    compile: Choice[bool]
    offload: Choice[bool]
    attention: Choice[str]
    loss: Choice[str]
    loss_chunk_tokens: Choice[int]
    micro_batch: Choice[int]
    accumulation: Choice[int]
    global_batch: Choice[int]
    accumulate: Choice[str]
    fused_optimizer: Choice[bool]

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.replicate.value * self.shard.value

    @property
    def run_dir(self) -> Path:
        """The directory that holds everything the run leaves."""
        return Path(self.config.runs_dir) / self.config.name

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads, over all ranks."""
        return self.global_batch.value * self.config.data.seq_len

    def choices(self) -> dict[str, Choice[Any]]:
        """All decisions by name, in the order in which they are explained."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Choice)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for plan.json."""
        return {
            "config": config_to_dict(self.config),
            "model": self.model.to_dict(),
            "hf_config": self.hf_config,
            "model_dir": self.model_dir,
            "weights_dir": self.weights_dir,
            "cluster": self.cluster.to_dict(),
            "memory": asdict(self.memory),
            "warnings": self.warnings,
            "choices": {name: asdict(choice) for name, choice in self.choices().items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`."""
        return cls(
            config=config_from_dict(data["config"]),
            model=ModelSpec.from_dict(data["model"]),
            hf_config=dict(data["hf_config"]),
            model_dir=data["model_dir"],
            weights_dir=data["weights_dir"],
            cluster=ClusterSpec.from_dict(data["cluster"]),
            memory=MemoryEstimate(**data["memory"]),
            warnings=list(data["warnings"]),
            **{name: Choice(**choice) for name, choice in data["choices"].items()},
        )

    def save(self, path: Path) -> None:
        """Write plan.json whole or not at all."""
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        aside.replace(path)

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a saved plan."""
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
