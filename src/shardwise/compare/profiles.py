"""What other training stacks are like: one set of numbers a stack, and a generic one for the rest.

A profile is a `Software` plus how its numbers change with what a row says: the generation of the
attention kernel, the float8 recipe, a model that is not gated. `foresight.py --fit` fits them to
published runs and writes `profiles.json`; nothing in a profile belongs to one row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shardwise.compare.published_rows import PublishedRun
from shardwise.compare.question import SpeedQuestion
from shardwise.plan.decisions import computes_float8
from shardwise.plan.software import Software
from shardwise.plan.time import TimeEstimate

Parameters = Mapping[str, float]
FOLDS = 5
PROFILES = Path(__file__).with_name("profiles.json")

# Where fits start, and how far rows may move it: a standard deviation of its logarithm. Chosen by
# hand with the table in view, as were the features themselves: leaving a stack out of a fit leaves
# its rows out, not what its rows have taught.
START: dict[str, tuple[float, float]] = {
    "matmul_factor": (0.95, 0.08),
    "attention_factor": (0.78, 0.15),
    "hidden_passes": (80.0, 0.3),
    "eager_factor": (5.0, 0.3),
    "ffn_passes": (5.0, 0.3),
    "loss_passes": (16.0, 0.4),
    "copy_factor": (1.5, 0.4),
    "contention": (0.045, 0.4),
    "wait_share": (0.006, 0.5),
    "step_s": (0.02, 0.7),
    "pass_s": (0.003, 0.7),
    # torchtitan's policy, which others have taken over: every second matmul runs again.
    "selective_recompute": (0.36, 0.05),
    "stops_early": (0.7, 0.3),
    "float8_factor": (1.0, 0.15),
    "float8_passes": (11.0, 0.3),
    "tensor_factor": (1.0, 0.3),
    "expert_factor": (1.0, 0.3),
    "exchange_s": (0.0003, 0.7),
    "grouped_factor": (0.85, 0.2),
    "half_rows": (90.0, 0.3),
    "routed_passes": (42.0, 0.3),
    "block_kernels": (60.0, 0.4),
    "link_factor": (1.0, 0.12),
    "unpack_passes": (14.0, 0.3),
    "adapter_passes": (12.0, 0.4),
    # How a row's own words change these.
    "flash1": (0.7, 0.15),
    "flash2_hopper": (0.5, 0.15),
    "flash2_blackwell": (0.28, 0.2),
    "plain_eager_factor": (1.5, 0.4),
    "float8_narrow": (1.3, 0.3),
    "rowwise_factor": (0.8, 0.15),
    "rowwise_narrow": (2.5, 0.3),
    "rowwise_passes": (1.8, 0.3),
    "async_overlap": (0.35, 0.3),
    "light_optimizer": (0.25, 0.5),
    "reinforcement_s": (1.6, 0.5),
    "handover_s": (1.0, 0.4),  # for a billion trained parameters
    "zero1_pieces": (40.0, 0.4),
    "early_zero3_links": (8.0, 0.2),  # one network card of eight
}
_SOFTWARE = {item.name for item in fields(Software)}
HOPPER = ("H100", "H200", "GH200", "H800", "H20")
BLACKWELL = ("B200", "GB200", "B300", "GB300")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStack:
    """A training stack with a profile of its own, and the words that tell it in a source's name."""

    name: str
    words: tuple[str, ...]
    start: Mapping[str, float] = field(default_factory=dict)
    """What is known of it before any fit."""

    typical: bool = True
    """Whether it says something of other stacks. Recipes that a vendor has tuned model by model do
    not."""


STACKS = (
    KnownStack(name="llm-foundry", words=("llm-foundry",)),
    # torchao's tables are runs of torchtitan.
    KnownStack(name="torchtitan", words=("torchtitan", "torchao")),
    KnownStack(name="prime-rl", words=("prime-rl",)),
    # Its ZeRO-1 reduces and gathers in small pieces.
    KnownStack(name="nanotron", words=("nanotron",), start={"zero1_pieces": 120.0}),
    # It recomputes norms and activations where others recompute matmuls too.
    KnownStack(
        name="megatron-bridge",
        words=("megatron-bridge",),
        start={"selective_recompute": 0.02},
        typical=False,
    ),
    KnownStack(name="automodel", words=("automodel",), typical=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackProfile:
    """Parameters fitted to all rows, and what they are without some."""

    parameters: Parameters
    without: Mapping[str, Parameters]
    """Of a stack: by fold of its own rows. Of the generic profile: by family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """All that was fitted, and which rows it has seen."""

    seen: frozenset[str]
    generic: StackProfile
    stacks: Mapping[str, StackProfile]

    def calibrated(self, run: PublishedRun) -> Parameters | None:
        """Its stack's parameters, fitted without this row; None where the stack has none."""
        stack = stack_of(run.source)
        if stack is None:
            return None
        profile = self.stacks[stack.name]
        return profile.without[fold_of(run)] if run.key in self.seen else profile.parameters

    def fitted(self, run: PublishedRun) -> Parameters | None:
        """Its stack's parameters, fitted with this row among others; None where they were not."""
        stack = stack_of(run.source)
        if stack is None or run.key not in self.seen:
            return None
        return self.stacks[stack.name].parameters

    def unseen(self, run: PublishedRun) -> Parameters:
        """The generic parameters, fitted without any row of this stack."""
        return self.generic.without.get(family_of(run.source), self.generic.parameters)

    def save(self, path: Path) -> None:
        """As JSON, in four digits."""
        data = {**asdict(self), "seen": sorted(self.seen)}
        path.write_text(json.dumps(_rounded(data), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Profiles:
        """Back from `save`."""
        data = json.loads(path.read_text())
        stacks = {name: StackProfile(**profile) for name, profile in data["stacks"].items()}
        generic = StackProfile(**data["generic"])
        return cls(seen=frozenset(data["seen"]), generic=generic, stacks=stacks)


def stack_of(source: str) -> KnownStack | None:
    """The stack that a source's name tells, if it has a profile."""
    low = source.lower()
    return next((each for each in STACKS if any(word in low for word in each.words)), None)


def family_of(source: str) -> str:
    """What counts as one stack when stacks are left out in turn."""
    stack = stack_of(source)
    return stack.name if stack else (source.lower().split() or ["?"])[0]


def fold_of(run: PublishedRun) -> str:
    """Which part of its stack's rows it is in."""
    return str(int(run.key, 16) % FOLDS)


def is_typical(run: PublishedRun) -> bool:
    """Whether the generic profile is fitted to it."""
    stack = stack_of(run.source)
    return stack is None or stack.typical


def families_of(runs: Sequence[PublishedRun]) -> list[str]:
    """All of them, in order."""
    return list(dict.fromkeys(family_of(run.source) for run in runs))


def question_of(run: PublishedRun, parameters: Parameters) -> SpeedQuestion:
    """The run as the time model is asked about it."""
    return SpeedQuestion(
        model=run.model,
        fabric=run.fabric,
        decided=run.decided,
        rates=run.rates,
        software=software_for(run, parameters),
    )


def predict(run: PublishedRun, parameters: Parameters) -> tuple[float, TimeEstimate]:
    """Tokens per second and GPU, and where the step goes."""
    question = question_of(run, parameters)
    estimate = question.estimate()
    return question.tokens_of_device() / estimate.total, estimate


def software_for(run: PublishedRun, parameters: Parameters) -> Software:
    """The stack as this row says it was used."""
    named: dict[str, Any] = {key: value for key, value in parameters.items() if key in _SOFTWARE}
    base = Software(**named)
    changes: dict[str, Any] = {
        "frozen": run.traits.frozen,
        "attention_factor": base.attention_factor * _flash_share(run, parameters),
    }
    if not run.traits.quantised:
        changes["unpack_passes"] = 0.0
    if not run.traits.frozen:
        changes["adapter_passes"] = 0.0
    if not run.gated:
        # LayerNorm is one kernel without the compiler too, and there is no rope.
        changes["eager_factor"] = parameters["plain_eager_factor"]
    if run.traits.light_states:
        changes["optimizer_passes"] = base.optimizer_passes * parameters["light_optimizer"]
    if run.traits.reinforcement:
        # The trainer gives its weights to the sampler after every step.
        trained = 0.0 if run.traits.frozen else run.model.total_params / 1e9
        changes["step_s"] = parameters["reinforcement_s"] + parameters["handover_s"] * trained
    return replace(base, **changes, **_float8(run, parameters), **_parallel(run, parameters))


def _float8(run: PublishedRun, parameters: Parameters) -> dict[str, Any]:
    if run.decided.linear != "param" and run.model.num_experts > 1:
        # These stacks convert stacked experts too.
        return {"converts_experts": True, "narrow_factor": parameters["float8_narrow"]}
    if not computes_float8(run.model, run.decided):
        return {}
    if not run.traits.rowwise:
        return {"narrow_factor": parameters["float8_narrow"]}
    return {
        "narrow_factor": parameters["rowwise_narrow"],
        "float8_factor": parameters["float8_factor"] * parameters["rowwise_factor"],
        "float8_passes": parameters["float8_passes"] * parameters["rowwise_passes"],
        "float8_gathers": False,
    }


def _parallel(run: PublishedRun, parameters: Parameters) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "sends_once": run.traits.sends_once,
        "stages_in_slots": run.traits.stages_in_slots,
        # So torchtitan, Megatron and nanotron order their ranks.
        "stages_outermost": True,
    }
    if run.traits.graphs:
        changes["exchange_s"] = 0.0
    if run.traits.async_tensor:
        changes["tensor_overlap"] = min(1.0, parameters["async_overlap"])
    if run.traits.zero1:
        changes["replica_pieces"] = parameters["zero1_pieces"]
        changes["splits_update"] = True
    if run.traits.early_zero3:
        # Recomputation gathers a third time and gradients are reduced in 16 bits: as many bytes as
        # two gathers and a reduction in fp32.
        changes["link_factor"] = parameters["early_zero3_links"]
    if run.traits.adapter_units and run.decided.shard > 1:
        # They fill the two gathers that FSDP1 lets run ahead, so a block's own waits for its turn.
        changes["overlaps"] = False
    return changes


def _flash_share(run: PublishedRun, parameters: Parameters) -> float:
    """What an attention kernel older than the device leaves of its rate."""
    share = 1.0
    if run.traits.flash < 3 and run.gpu.name in HOPPER:
        share = parameters["flash2_hopper"]
    if run.traits.flash < 3 and run.gpu.name in BLACKWELL:
        share = parameters["flash2_blackwell"]
    return share * parameters["flash1"] if run.traits.flash < 2 else share


def _rounded(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    return float(f"{data:.4g}") if isinstance(data, float) else data
