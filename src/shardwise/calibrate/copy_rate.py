"""Bytes per second of copies and of element-wise work, and what one small operation costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from shardwise.metrics.clock import Clock
from shardwise.units import KIB, MIB

_COPIES = {
    "cuda": (1 * MIB, 16 * MIB, 256 * MIB, 1024 * MIB),
    "cpu": (64 * KIB, 1 * MIB, 16 * MIB),
}
# Tokens and channels of activations.
_ACTIVATIONS = {
    "cuda": ((4096, 4096), (8192, 8192), (16384, 14336)),
    "cpu": ((512, 128), (1024, 512), (2048, 1024)),
}
# Tensors that `_gated_and_normed` reads and writes.
_TENSORS_MOVED = 13
_SMALL_OPERATIONS = 200


def measure_copies(clock: Clock) -> Iterator[dict[str, Any]]:
    """Bytes read and written per second, over sizes."""
    for size in _COPIES[clock.device.type]:
        source = torch.zeros(size, dtype=torch.uint8, device=clock.device)
        target = torch.ones_like(source)
        seconds = clock.seconds(partial(target.copy_, source))
        yield {"bytes": size, "bytes_per_s": 2 * size / seconds}


def measure_elementwise(clock: Clock, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Bytes read and written per second by a gated activation, a residual and a norm."""
    for shape in _ACTIVATIONS[clock.device.type]:
        gate, up, residual = (torch.randn(shape, device=clock.device).to(dtype) for _ in range(3))
        with torch.no_grad():
            seconds = clock.seconds(partial(_gated_and_normed, gate, up, residual))
        moved = _TENSORS_MOVED * gate.numel() * gate.element_size()
        yield {"tokens": shape[0], "channels": shape[1], "bytes_per_s": moved / seconds}


def fit_elementwise(points: Sequence[dict[str, Any]]) -> float:
    """The median rate: small tensors stay in a cache, and large ones do not."""
    return statistics.median(point["bytes_per_s"] for point in points)


def measure_launch(clock: Clock) -> float:
    """Seconds that the host takes for one operation on next to no data."""
    small = torch.zeros(16, device=clock.device)

    def work() -> None:
        for _ in range(_SMALL_OPERATIONS):
            small.add_(1.0)

    return clock.seconds(work) / _SMALL_OPERATIONS


def _gated_and_normed(gate: Tensor, up: Tensor, residual: Tensor) -> Tensor:
    hidden = silu(gate) * up + residual
    return hidden * hidden.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
