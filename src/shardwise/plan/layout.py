"""The decisions that memory and time depend on, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.facts.models import ModelSpec

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a step is laid out over the ranks."""

    replicate: int = 1
    shard: int
    keeps_gathered: bool
    param_dtype: str
    reduce_dtype: str
    checkpoint_activations: str | float
    compile: bool
    offload: bool
    offload_activations: float = 0.0
    """Share of the blocks whose activations wait in host memory."""

    micro_batch: int
    accumulation: int = 1
    seq_len: int
    loss_chunk_tokens: int | None
    accumulates_unsharded: bool
    float8: bool = False
    float8_gather: bool = True
    """Float8 weights are cast before they are gathered."""

    float8_rowwise: bool = False
    """One scale a row instead of one a tensor."""

    flash_attention_4: bool = False
    bf16_state: bool = False
    """Adam's moments are bf16 instead of fp32."""

    own_kernels: bool = True
    """AdamW and the copy into a reduction are ours, not torch's."""

    balances_routers: bool = False
    """Routers' logits are kept for the load-balancing loss."""

    gathers_in_place: bool = False
    """Parameters are gathered where they are used, not copied there."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    """Groups that the experts of a block are dealt out to; they lie on the shard axis."""

    pipeline: int = 1
    pipeline_chunks: int = 1
    """Model chunks a pipeline stage interleaves; more of them shrink the bubble."""

    @property
    def tokens(self) -> int:
        """Tokens that one rank works on in one micro-batch."""
        return self.micro_batch * self.seq_len // self.context


def gathered_block_params(model: ModelSpec, layout: Layout) -> int:
    """Those of a block that one rank gathers: the experts of other groups it never has."""
    return model.block_params - model.expert_params + model.expert_params // layout.expert


def gathered_params(model: ModelSpec, layout: Layout) -> int:
    """Those of the whole model."""
    elsewhere = model.block_params - gathered_block_params(model, layout)
    return model.total_params - model.num_layers * elsewhere


def makes_product_again(model: ModelSpec, layout: Layout) -> bool:
    """Whether SwiGLU's backward, a kernel of ours, makes the product that forward then drops."""
    return model.swiglu and layout.own_kernels and not layout.float8
