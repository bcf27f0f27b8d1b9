"""The Plan: every decision about a run, each with its reason. Workers read it and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from shardwise.config.plain import config_from_dict, config_to_dict
from shardwise.config.rules import validate_rules
from shardwise.config.schema import RunConfig
from shardwise.config.typed import validate_types
from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.files import read_json, replace_file
from shardwise.plan.decisions import Choice, Choices, Decisions, explained
from shardwise.plan.settings import Settings, settle

# What every plan has said from the first version on; what is newer, an older plan leaves out.
FIRST = frozenset(
    (
        *("strategy", "replicate", "shard", "reshard_after_forward", "forward_prefetch"),
        *("backward_prefetch", "param_dtype", "reduce_dtype", "output_dtype", "compile"),
        *("checkpoint_activations", "offload", "attention", "loss", "loss_chunk_tokens"),
        *("micro_batch", "accumulation", "global_batch", "accumulate", "fused_optimizer"),
    )
)


@dataclass(frozen=True, slots=True)
class _Spread:
    """How far memory that is no state may be off, as shares of it."""

    below: float
    above: float


_MEASURED = _Spread(0.05, 0.06)
# What measured runs of other families were off when their blocks were taken for a Llama's: from
# -50% (Qwen3-30B-A3B) to +28% (Mixtral).
_GUESSED = _Spread(0.5, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Expected bytes on one rank at the peak of a step, by what they hold."""

    peak: str
    """The moment that binds: `loss` or `backward`."""

    params: int
    grads: int
    """Gradients that exist at the peak: those of earlier passes."""

    optimizer: int
    gathered: int
    """Parameters that stay gathered from forward to backward."""

    buffers: int
    """Units being gathered and gradients being reduced."""

    activations: int
    recompute: int
    loss: int
    allocator: int
    """What the allocator holds besides: other streams' pools, gradient shards among them."""

    context: int
    """CUDA's context and NCCL's buffers."""

    outer: int = 0
    """The parameters of the last outer step and their momentum, and what is being exchanged beside
    inner steps."""

    frozen: int = 0
    """Those bytes of `params` that are not trained."""

    unsure: int = 0
    """The part of the allocator's that is there once, twice or not at all: for blocks of experts,
    whose large tensors do or do not fit what others have left."""

    guessed: bool = False
    """Whether blocks are taken for those of a Llama because what theirs save was not counted."""

    @property
    def states(self) -> int:
        """Parameters, gradients and Adam, sharded; exact, whatever the batch."""
        return 2 * self.params - self.frozen + self.optimizer + self.outer

    @property
    def allocated(self) -> int:
        """What `torch.cuda.max_memory_allocated` will show."""
        return self.reserved - self.allocator

    @property
    def reserved(self) -> int:
        """What `torch.cuda.max_memory_reserved` will show."""
        return self.total - self.context

    @property
    def total(self) -> int:
        """What the device must have."""
        return sum(_parts_of(self))

    @property
    def low(self) -> int:
        """The least that is likely: what moves was measured to within a few percent."""
        total = self.total
        return round(total - self.unsure - self._spread.below * (total - self.states))

    @property
    def high(self) -> int:
        """The most that is likely. Uneven experts do not widen it: each of a token's experts has a
        row for it, so there are as many rows."""
        total = self.total
        return round(total + self.unsure + self._spread.above * (total - self.states))

    @property
    def _spread(self) -> _Spread:
        return _GUESSED if self.guessed else _MEASURED


_NO_PARTS = ("peak", "frozen", "unsure", "guessed")
# The fields whose bytes add up to the total.
MEMORY_PARTS = tuple(f.name for f in fields(MemoryEstimate) if f.name not in _NO_PARTS)
# A search asks for tens of thousands of totals.
_parts_of = attrgetter(*MEMORY_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How fast the run is expected to be, and what that costs."""

    step_s: float
    terms: dict[str, float]
    """Seconds of a step by what they are spent on."""

    tokens_per_s: float
    """Of one device."""

    mfu: float | None
    hfu: float | None
    tokens_to_hide: int
    """Tokens of a micro-batch from which on compute hides the unit collectives."""

    usd_per_billion_tokens: float | None
    hours_per_billion_tokens: float
    source: Literal["catalogue", "measured"]
    """Where the device's rates are from."""

    price_source: str | None = None
    """Who says what a GPU costs; None where no price is known."""

    reference_s: float | None = None
    """Seconds that a reference takes for the sequences of one step; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What sites are expected to exchange with each other, and how long that takes."""

    bytes_per_rank: int
    """Bytes that a rank sends between two outer steps."""

    seconds: float | None = None
    """The time that they take; None where no link is named."""

    waited_s: float | None = None
    """The part of it that inner steps do not hide; None where no speed is known, as the next
    two."""

    share: float | None = None
    """Share of the time that a site waits."""

    least_steps: int | None = None
    """The fewest steps between outer steps that keep `diloco.max_share`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that was not chosen, and why."""

    label: str
    tokens_per_s: float | None
    memory_bytes: int
    why_not: str


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
    forecast: Forecast | None
    """Speed and cost; None where no rates are known: `shardwise plan --calibrate` measures."""

    alternatives: list[Alternative]
    warnings: list[str]

    choices: Choices
    """Every decision with its reason, by name, in the order in which they are explained."""

    outlook: Outlook | None = None
    """What sites exchange; None where there is one."""

    decided: Decisions = field(init=False)
    """The values of the choices."""

    settings: Settings = field(init=False)
    """What ranks read of the configuration."""

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("choices", {name: self.choices[name] for name in explained()})
        put("decided", Decisions.of(self.choices, self.config.data.seq_len, self.config.num_jobs))
        put("settings", settle(self.config, self.decided))

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.decided.world_size

    @property
    def run_dir(self) -> Path:
        """The directory that holds everything the run leaves."""
        return Path(self.settings.runs_dir) / self.settings.name

    @property
    def peak_bytes(self) -> int:
        """What a rank's measured peak stands beside: the allocator's on a GPU, and on a CPU all
        that the process holds, its libraries included."""
        return self.memory.reserved if self.cluster.device == "cuda" else self.memory.total

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads, over all ranks."""
        return self.decided.global_batch * self.decided.seq_len

    def with_choices(self, **choices: Choice[Any]) -> Plan:
        """The same plan with other decisions."""
        return replace(self, choices={**self.choices, **choices})

    def with_steps(self, steps: int) -> Plan:
        """The same plan for so many steps."""
        train = replace(self.config.train, steps=steps)
        return replace(self, config=replace(self.config, train=train))

    def validate_steps(self) -> None:
        """Raise where a setting does not go with the steps that epochs became. Nobody could judge
        that before."""
        train = replace(self.config.train, epochs=None)
        validate_rules(replace(self.config, train=train))

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
            "forecast": None if self.forecast is None else asdict(self.forecast),
            "outlook": None if self.outlook is None else asdict(self.outlook),
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
            "warnings": self.warnings,
            "choices": {name: asdict(choice) for name, choice in self.choices.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`; TypeError where a value is not of its field's type."""
        plan = cls(
            config=config_from_dict(data["config"]),
            model=ModelSpec.from_dict(data["model"]),
            hf_config=dict(data["hf_config"]),
            model_dir=data["model_dir"],
            weights_dir=data["weights_dir"],
            cluster=ClusterSpec.from_dict(data["cluster"]),
            memory=MemoryEstimate(**data["memory"]),
            forecast=None if data["forecast"] is None else Forecast(**data["forecast"]),
            outlook=Outlook(**data["outlook"]) if data.get("outlook") else None,
            alternatives=[Alternative(**each) for each in data["alternatives"]],
            warnings=list(data["warnings"]),
            choices=_read_choices(data["choices"]),
        )
        validate_types(plan, cls, "")
        return plan

    def save(self, path: Path) -> None:
        """Write plan.json whole or not at all."""
        replace_file(path, (json.dumps(self.to_dict(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a saved plan."""
        try:
            return cls.from_dict(read_json(path))
        except OSError as error:
            raise UserError(
                f"{path} cannot be read: {error.strerror}",
                fix=f"ls -l {path}",
                code=ExitCode.ENVIRONMENT,
            ) from error
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise UserError(
                f"{path} is not a plan that this version can read",
                why=str(error) if isinstance(error, ValueError | TypeError) else repr(error),
                fix=f"restore it from a backup, or move it away: mv {path} {path}.broken; the "
                "next `shardwise train` writes a run's plan.json anew",
                code=ExitCode.VERIFY_FAILED,
            ) from error


def _read_choices(data: Mapping[str, Any]) -> Choices:
    """The choices of a saved plan. Raises ValueError where it lacks one that it must have."""
    choices: Choices = {name: Choice(**choice) for name, choice in data.items()}
    if unknown := choices.keys() - set(explained()):
        raise ValueError(f"it has a choice that does not exist: {min(unknown)}")
    if missing := FIRST - choices.keys():
        raise ValueError(f"it has no choice of {min(missing)}")
    older = {
        item.name: Choice(item.default, "this plan is older than the option", "rule")
        for item in fields(Decisions)
    }
    return {name: choices.get(name, older[name]) for name in explained()}
