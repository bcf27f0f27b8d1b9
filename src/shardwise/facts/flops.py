"""FLOPs of one trained token, by the one convention that every MFU here is stated in.

Forward and backward cost 6 FLOPs for each weight that multiplies the token (2 forward, 4
backward): linear layers, the token's own experts and the output head, but not the input embedding,
norms or biases. Attention adds 12 for each block, query channel and token attended to (scores and
values, 2 each forward, twice that backward); causal masking leaves half the sequence on average,
so 6 x layers x heads x head_dim x seq_len. A sliding window that every block has shortens that
average. Recomputation is not counted: MFU measures the model's work, and HFU, which adds
`recompute_flops_per_token`, the hardware's.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    attention = spec.num_layers * attention_flops(spec, seq_len)
    return 6.0 * spec.matmul_params_per_token + 3.0 * attention


def recompute_flops_per_token(spec: ModelSpec, seq_len: int, fraction_of_blocks: float) -> float:
    """What running that share of the blocks' forward a second time adds."""
    attention = spec.num_layers * attention_flops(spec, seq_len)
    return fraction_of_blocks * (2.0 * spec.block_matmul_params_per_token + attention)


def attention_flops(spec: ModelSpec, seq_len: int) -> float:
    """Attention FLOPs of one token in one block, forward."""
    return 4.0 * spec.num_heads * spec.head_dim * _mean_context(seq_len, spec.attention_window)


def _mean_context(seq_len: int, window: int | None) -> float:
    """Tokens that a token attends to, on average over the sequence."""
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window**2 / (2 * seq_len)
