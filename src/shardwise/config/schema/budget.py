"""What memory and number formats a run may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.config.schema.words import Auto, DtypeName


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Which number formats are used. Master weights of all that is trained are fp32."""

    param: DtypeName | Auto = "auto"
    """Format of gathered parameters and compute. `auto`: bf16 where a GPU computes it,
    fp16 with loss scaling where it has only that, else fp32; fp32 on CPUs."""

    linear: Literal["auto", "param", "float8", "float8_rowwise"] = "auto"
    """Format of the matmuls in the linear layers of blocks. `float8`: one scale per tensor, weights
    gathered in eight bits; `float8_rowwise`: one scale per row, weights gathered in `param`. Both
    need a GPU with float8 matmuls, torch.compile and `pip install shardwise[float8]`. `auto` is
    `param`, the format above: float8 changes the numbers, so it is never chosen for you."""

    experts: Literal["param", "float8"] = "param"
    """Format of the grouped matmuls of a mixture's experts. `float8`: e4m3 with one scale per row,
    on Hopper, and in emulation on CPUs; weights are gathered in `param`. It was not yet run on a
    GPU. It changes the numbers, so it is never chosen for you."""

    float8_min_features: int = 1024
    """The smallest in_features and out_features of a layer that float8 is used for. The cost of
    casts grows with the width, and the gain grows with its square. Unused without float8."""

    reduce: DtypeName | Auto = "auto"
    """Format of the gradient reduction. `auto` is fp32; bf16 can diverge on long runs."""

    output: DtypeName | None = None
    """Format that the model's output is cast to; unset: whatever the last layer gives."""

    cast_forward_inputs: bool = True
    """Cast floating-point inputs of every unit to `param` before its forward."""

    loss_scale: float = 65536.0
    """The first loss scale when `param` is fp16. It falls by half when gradients overflow, and the
    batch is computed again; it doubles after 2000 steps without an overflow. Unused without
    fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """What is traded to save memory."""

    checkpoint_activations: Literal["auto", "none", "full", "selective"] | float = "auto"
    """`full` recomputes every block in backward, `selective` keeps matmul and attention results
    and recomputes the rest, a fraction (0 to 1) recomputes that share of the blocks, evenly."""

    compile: bool | Auto = "auto"
    """Compile each block with torch.compile. `auto`: on GPUs, not on CPUs, nor where
    `mesh.pipeline_schedule` is `zero_bubble`."""

    offload_activations: float = 0.0
    """Share of the blocks, 0 to 1, whose activations are in host memory until backward. The copies
    run beside compute and cost little as long as PCIe is fast enough for them. `shardwise plan`
    says how much host memory that takes, and how much of the copies is exposed."""

    offload: Literal["none", "cpu"] = "none"
    """`cpu` keeps parameters, gradients and optimizer state in host memory."""

    offload_optimizer: bool = False
    """Keep Adam's two moments in host memory (paged Adam). Parameters and gradients stay on the
    device, and each update brings moments there page by page and back. `shardwise plan` says how
    much host memory that takes."""

    pin_memory: bool = True
    """With `offload` and a GPU: use pinned host memory, so that copies overlap with compute."""

    overlap_optimizer: bool = True
    """With `offload`: let the host update one unit after the other beside the next forward, which
    waits for the update of each unit that it needs. The numbers are the same without it."""

    loss: Literal["auto", "chunked", "full"] = "auto"
    """`chunked` computes head and cross-entropy together, a slice of tokens at a time, and never
    holds all logits; `full` calls the model's own forward. `auto`: chunked where the model's logits
    are a projection of its last hidden state, scaled or soft-capped or not (checked on the real
    model at start)."""

    loss_chunk_tokens: int | Auto = "auto"
    """Tokens per slice of the chunked loss."""

    accumulate: Literal["auto", "unsharded", "sharded"] = "auto"
    """With gradient accumulation: `unsharded` keeps whole gradients and reduces once, on the last
    micro-batch; `sharded` reduce-scatters every micro-batch (less memory, more traffic). HSDP
    all-reduces across replicas on the last micro-batch only, either way."""
