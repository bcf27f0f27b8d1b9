"""Every decision about a run as one typed value, and the reason for each.

A decision is defined here once. Candidates vary it, the estimates of memory and time read it, the
plan explains it, and ranks carry it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_type_hints

from shardwise.config.schema import FLOAT8_FORMATS
from shardwise.facts.models import ModelSpec

T = TypeVar("T")
Source = Literal["user", "rule", "search", "measured"]
UNSAID = "-"  # by a plan that is older than the entry
FLOAT8_BASE = "float8_base"
"""Of `linear`: frozen layers multiply the float8 that they store. Users ask for it by
`adapter.base`."""

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """A decided value, why it was decided so, and who decided."""

    value: T
    why: str
    source: Source


Choices = dict[str, Choice[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What will be done. `Annotated` names the setting that a user writes for it.

    The order is that of the explanation. A default is what runs did before there was the decision,
    so that plans of older versions can be read.
    """

    weights: str = UNSAID
    """`random`, or the place that the first weights are read from."""

    tokenizer: str = UNSAID
    packing: Annotated[str, "data.packing"] = "cut"
    """How documents share sequences."""

    adapter: Annotated[str, "adapter.method"] = "none"
    """`lora`: adapters are trained, and the model's own weights are frozen."""

    base: Annotated[str, "adapter.base"] = "param"
    """The format that frozen weights are stored and gathered in."""

    objective: Annotated[str, "preference.objective"] = "none"
    """How answers are compared; `none`: the next token is trained on."""

    kl_term: bool = False
    """Answers are also exchanged between prompts, in one more forward of each step."""

    strategy: Annotated[str, "shard.strategy"] = "no_shard"
    site: Annotated[int, "mesh.site"] = 1
    """Groups of ranks that train apart between two outer steps."""

    replicate: Annotated[int, "mesh.replicate"] = 1
    shard: Annotated[int, "mesh.shard"] = 1
    pipeline: Annotated[int, "mesh.pipeline"] = 1
    pipeline_schedule: Annotated[str, "mesh.pipeline_schedule"] = "1f1b"
    pipeline_chunks: Annotated[int, "mesh.pipeline_chunks"] = 1
    """Stages on each rank; more of them shrink the bubble."""

    pipeline_blocks: Annotated[str, "mesh.pipeline_blocks"] = "-"
    """Blocks of each stage, such as 5+3; `-` where there is one."""

    pipeline_recompute: Annotated[str, "mesh.pipeline_recompute"] = "-"
    """What each rank of a pipeline recomputes, such as full+none; `-` where all do alike."""

    tensor: Annotated[int, "mesh.tensor"] = 1
    sequence_parallel: Annotated[bool, "mesh.sequence_parallel"] = False
    """Ranks along `tensor` divide the tokens of norms and of the residual."""

    context: Annotated[int, "mesh.context"] = 1
    expert: Annotated[int, "mesh.expert"] = 1
    """Parts that the experts of a block are dealt out in. They have no ranks of their own."""

    reshard_after_forward: Annotated[bool | int, "shard.reshard_after_forward"] = True
    keeps_experts: Annotated[bool, "shard.keep_experts"] = False
    """Dealt experts stay gathered from forward to backward, where the rest is freed."""

    forward_prefetch: Annotated[int, "shard.forward_prefetch"] = 0
    backward_prefetch: Annotated[int, "shard.backward_prefetch"] = 1
    param_dtype: Annotated[str, "precision.param"] = "fp32"
    linear: Annotated[str, "precision.linear"] = "param"
    float8_gather: bool = False
    """Float8 weights are cast before they are gathered."""

    experts: Annotated[str, "precision.experts"] = "param"
    """What grouped matmuls of experts compute in."""

    reduce_dtype: Annotated[str, "precision.reduce"] = "fp32"
    output_dtype: Annotated[str | None, "precision.output"] = None
    checkpoint_activations: Annotated[str | float, "memory.checkpoint_activations"] = "none"
    compile: Annotated[bool, "memory.compile"] = False
    offload: bool = False
    """Parameters, gradients and optimizer state are in host memory."""

    overlap_optimizer: bool = False
    """The host updates parameters beside the next forward."""

    offload_optimizer: Annotated[bool, "memory.offload_optimizer"] = False
    """Adam's moments alone are in host memory, and pass through the device in pages."""

    offload_activations: Annotated[float, "memory.offload_activations"] = 0.0
    """Share of the blocks whose activations wait in host memory."""

    attention: Annotated[str, "model.attention"] = "sdpa"
    loss: Annotated[str, "memory.loss"] = "chunked"
    loss_chunk_tokens: Annotated[int, "memory.loss_chunk_tokens"] = 1024
    micro_batch: Annotated[int, "train.micro_batch"] = 1
    accumulation: Annotated[int, "train.accumulation"] = 1
    global_batch: Annotated[int, "train.global_batch"] = 1
    accumulate: Annotated[str, "memory.accumulate"] = "unsharded"
    optimizer: Annotated[str, "optim.name"] = "adamw"
    fused_optimizer: Annotated[bool, "optim.fused"] = False
    optimizer_state: Annotated[str, "optim.state"] = "fp32"
    decay_embeddings: Annotated[bool, "optim.decay_embeddings"] = True
    kernels: Annotated[str, "train.kernels"] = "torch"
    gather_in_place: Annotated[bool, "shard.gather_in_place"] = False
    """Parameters are gathered where they are used, not copied there."""

    router_aux_loss: Annotated[float, "train.router_aux_loss"] = 0.0
    router_z_loss: Annotated[float, "train.router_z_loss"] = 0.0

    # What follows needs no reason: it is the user's, or there is no choice yet.
    seq_len: Annotated[int, "data.seq_len"] = 2048
    jobs: int = 1
    """Jobs that divide the global batch, each of them a site."""

    outer_bytes: int = 0
    """Bytes for each parameter of a shard that joining several sites takes. Estimates of memory
    alone read it."""

    @classmethod
    def of(cls, choices: Mapping[str, Choice[Any]], seq_len: int, jobs: int = 1) -> Decisions:
        """The values of choices, by name."""
        values = {name: choice.value for name, choice in choices.items()}
        return cls(seq_len=seq_len, jobs=jobs, **values)

    @property
    def data_ranks(self) -> int:
        """Ranks of this job that read different sequences. All others share a micro-batch with one
        of them."""
        return self.site * self.replicate * self.shard

    @property
    def world_size(self) -> int:
        """All ranks of the mesh."""
        return self.data_ranks * self.pipeline * self.context * self.tensor

    @property
    def tokens(self) -> int:
        """Tokens that one rank works on in one micro-batch."""
        return self.micro_batch * self.seq_len // self.context

    @property
    def keeps_gathered(self) -> bool:
        """Parameters stay gathered from forward to backward."""
        return self.reshard_after_forward is False

    @property
    def frees_experts(self) -> bool:
        """Backward gathers experts again."""
        return not (self.keeps_gathered or self.keeps_experts)

    @property
    def holds_gathered(self) -> bool:
        """Parameters come from host memory once a step: they stay gathered from one micro-batch to
        the next."""
        return self.offload and self.keeps_gathered and self.accumulation > 1

    @property
    def accumulates_unsharded(self) -> bool:
        """Whole gradients are kept from one micro-batch to the next."""
        return self.accumulate == "unsharded" and self.accumulation > 1

    @property
    def slice_tokens(self) -> int | None:
        """Tokens whose logits exist at once; None where those of all do."""
        return None if self.loss == "full" else self.loss_chunk_tokens

    @property
    def own_kernels(self) -> bool:
        """AdamW and the copy into a reduction are ours, not torch's."""
        return self.kernels == "own"

    @property
    def compares(self) -> bool:
        """Answers are compared, so that backward computes logits again."""
        return self.objective != "none"

    @property
    def float8_rowwise(self) -> bool:
        """One scale per row instead of one per tensor."""
        return self.linear == "float8_rowwise"


@cache
def explained() -> tuple[str, ...]:
    """The decisions that have a reason, in the order in which they are shown."""
    names = [item.name for item in fields(Decisions)]
    return tuple(names[: names.index("seq_len")])


@cache
def setting_paths() -> dict[str, str]:
    """The setting of each decision that has one, such as `train.micro_batch`."""
    hints = get_type_hints(Decisions, include_extras=True)
    return {
        name: get_args(hint)[1] for name, hint in hints.items() if hasattr(hint, "__metadata__")
    }


def multiplies_base(decided: Decisions) -> bool:
    """Whether frozen layers multiply the float8 that they store."""
    return decided.linear == FLOAT8_BASE


def computes_float8(model: ModelSpec, decided: Decisions) -> bool:
    """Whether forecasts treat a block as float8: not where most of it is stacked experts."""
    return decided.linear in FLOAT8_FORMATS and model.num_experts == 1


def multiplies_experts(decided: Decisions) -> bool:
    """Whether grouped matmuls of experts are in float8."""
    return decided.experts == "float8"


def makes_product_again(model: ModelSpec, decided: Decisions) -> bool:
    """Whether SwiGLU's backward, which is our kernel, recomputes the product, so that forward
    does not save it."""
    return model.gated_mlp and decided.own_kernels and not computes_float8(model, decided)
