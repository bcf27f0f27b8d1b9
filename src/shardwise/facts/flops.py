"""FLOPs of one trained token, by the one convention that every MFU here is stated in.

Forward and backward cost 6 FLOPs for each weight that multiplies the token (2 forward, 4
backward): linear layers, the token's own experts and the output head, but not the input embedding,
norms or biases. Attention adds 6 for each block, head and token attended to, for each channel of
the head's keys (scores) and of its values; these differ in latent attention. Causal masking leaves
half the sequence on average, so 6 x layers x heads x head_dim x seq_len where they do not. A
block's sliding window shortens that average for this block. A block without scores, as those of
Mamba, adds nothing beyond its weights. A frozen weight costs 4 FLOPs (2 forward, 2 backward),
because it has no gradient, and an adapter over it 6 for each of its own weights. Recomputation is
not counted: MFU measures the model's work, and HFU, which adds `recompute_flops_per_token`, the
hardware's.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.facts.block_work import mean_context
from shardwise.facts.models import ModelSpec


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the device's dense peak: by the model's FLOPs, and with recompute counted."""

    mfu: float
    hfu: float


def efficiency_of(
    spec: ModelSpec, seq_len: int, mode: str | float, tokens_per_s: float, peak_flops: float
) -> Efficiency:
    """The efficiency at `tokens_per_s` on one device, with recompute by `mode`."""
    useful = flops_per_token(spec, seq_len)
    again = recompute_flops_per_token(spec, seq_len, recomputed_share(mode))
    rate = tokens_per_s / peak_flops
    return Efficiency(useful * rate, (useful + again) * rate)


def recomputed_share(mode: str | float) -> float:
    """Share of the blocks whose matmuls run again in backward, by `checkpoint_activations`."""
    if isinstance(mode, str):
        return 1.0 if mode == "full" else 0.0
    return mode


def flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Model FLOPs of one token's forward and backward, averaged over a packed sequence."""
    if spec.adapter is None:
        matmuls = 6.0 * spec.matmul_params_per_token
    else:
        adapters = spec.adapter.rank * spec.adapter.channels
        matmuls = 4.0 * spec.matmul_params_per_token + 6.0 * adapters + 2.0 * spec.adapter.head
    return matmuls + 3.0 * attention_flops(spec, seq_len)


def recompute_flops_per_token(spec: ModelSpec, seq_len: int, fraction_of_blocks: float) -> float:
    """What running that share of the blocks' forward a second time adds."""
    matmuls = 2.0 * spec.block_matmul_params_per_token
    return fraction_of_blocks * (matmuls + attention_flops(spec, seq_len))


def attention_flops(spec: ModelSpec, seq_len: int) -> float:
    """Attention FLOPs of one token in all blocks, forward."""
    if spec.kinds:
        return sum(kind.count * kind.work.attention_flops(seq_len) for kind in spec.kinds)
    context = mean_context(seq_len, spec.attention_window)
    return spec.num_layers * 4.0 * spec.num_heads * spec.head_dim * context
