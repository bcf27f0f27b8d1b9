"""FLOP/s of causal attention, forward and backward, with the kernel that training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardwise.calibrate.fit import fit_saturation
from shardwise.metrics.clock import Clock
from shardwise.training.surroundings import fast_attention

# Heads, their width, and lengths of sequences. Each length has as many sequences as make up the
# tokens.
_HEADS = {"cuda": (32, 128), "cpu": (4, 64)}
_TOKENS = {"cuda": 16384, "cpu": 512}
_LENGTHS = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (64, 128, 256, 512)}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The attention that a run uses by default."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def measure_attention(clock: Clock, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """A point for each length; masked scores are not counted."""
    kind = clock.device.type
    (heads, width), tokens = _HEADS[kind], _TOKENS[kind]
    for length in _LENGTHS[kind]:
        shape = (tokens // length, heads, length, width)
        forward_s, backward_s = attention_seconds(clock, dtype, shape)
        flops = 4.0 * tokens * heads * width * length / 2
        yield {"length": length, "forward": flops / forward_s, "backward": 2.5 * flops / backward_s}


def fit_attention(points: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """(forward FLOP/s, backward FLOP/s, half context) of long sequences."""
    halves = {
        name: fit_saturation([(point["length"], point[name]) for point in points])[1]
        for name in ("forward", "backward")
    }
    # One half context describes both passes. Backward takes about 5/7 of the time and weighs so.
    half = (2 * halves["forward"] + 5 * halves["backward"]) / 7
    longest = points[-1]
    scale = 1 + half / longest["length"]
    return scale * longest["forward"], scale * longest["backward"], half


def attention_seconds(
    clock: Clock,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    attend: Attend = by_torch,
) -> tuple[float, float]:
    """(forward, backward) of causal attention over (sequences, heads, length, width)."""
    sides = [torch.randn(shape, device=clock.device).to(dtype) for _ in range(3)]
    for side in sides:
        side.requires_grad_()
    with fast_attention(clock.device):
        output = attend(*sides)
        gradient = torch.randn_like(output)
        forward = clock.seconds(lambda: attend(*sides))
        backward = clock.seconds(
            lambda: torch.autograd.grad(output, sides, gradient, retain_graph=True)
        )
    return forward, backward
