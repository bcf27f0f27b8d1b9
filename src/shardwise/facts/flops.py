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

from shardwise.facts.models import ModelSpec


def flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Model FLOPs of one token's forward and backward, averaged over a packed sequence."""
    return 6.0 * spec.matmul_params_per_token + 3.0 * _attention_forward(spec, seq_len)


def recompute_flops_per_token(spec: ModelSpec, seq_len: int, fraction_of_blocks: float) -> float:
    """What running that share of the blocks' forward a second time adds."""
    forward = 2.0 * spec.block_matmul_params_per_token + _attention_forward(spec, seq_len)
    return fraction_of_blocks * forward


def _attention_forward(spec: ModelSpec, seq_len: int) -> float:
    channels = spec.num_heads * spec.head_dim
    return 4.0 * spec.num_layers * channels * _mean_context(seq_len, spec.attention_window)


def _mean_context(seq_len: int, window: int | None) -> float:
    """Tokens that a token attends to, on average over the sequence."""
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window**2 / (2 * seq_len)
