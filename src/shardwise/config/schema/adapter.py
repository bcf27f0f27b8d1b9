"""What is trained in place of the model's own weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters. The model's own weights are frozen then, in the format of
    `precision.param`, and have neither gradients nor optimizer state."""

    method: Literal["none", "lora"] = "none"
    """`lora` adds `B @ A` to the weight of each target and trains A and B alone. `none` trains the
    model's own weights."""

    targets: str | list[str] = ALL_LINEAR
    """Which layers get adapters: patterns of names, such as `q_proj`, `*_proj` or `layers.0.*`,
    each matched against the name or its end. `all-linear` is every linear layer but the head.
    Experts that are stacked in one tensor get adapters where a pattern such as `experts.*` matches
    them, and a router only where a pattern names it without a `*`."""

    base: Literal["auto", "param", "nf4", "float8", "mxfp4", "fp8"] = "auto"
    """The format that frozen linear layers are stored and gathered in. `param` is that of
    `precision.param`. `nf4` is four bits for each weight (QLoRA): layers make floats of them where
    they compute. `float8` is one byte for each: GPUs that compute float8 multiply them as they are,
    others make floats of them. `mxfp4` and `fp8` keep the bytes of files that are published so
    (gpt-oss, DeepSeek-V3): layers make floats of them. `auto` is one of these two for such a model,
    else `param`. The head, embeddings, norms and routers stay in the format of
    `precision.param`."""

    rank: int = 16
    """Rows of A and columns of B."""

    alpha: float = 32.0
    """The product of A and B is multiplied by alpha / rank."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that a larger rank does not learn more slowly."""

    dora: bool = False
    """Also train the length of each row of a weight, and let A and B change its direction alone
    (DoRA). Each forward computes the lengths of all rows anew, which takes a pass over the
    weights."""

    dropout: float = 0.0
    """Share of the channels that go into A that is dropped in training, 0 to 1."""

    modules_to_save: list[str] = field(default_factory=list)
    """Embeddings, the head and norms that are trained whole beside the adapters, in fp32: patterns
    of names, as for `targets`. `[embed_tokens, lm_head]` is for new tokens or another language."""

    weights_from: str | None = None
    """A directory in PEFT's format, with adapter_config.json and adapter_model.safetensors, whose
    adapters training begins with. Its rank, alpha and targets must be those of this section."""
