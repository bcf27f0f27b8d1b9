"""FLOP/s of matmuls as in training: a layer's forward, and the two matmuls of its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.calibrate.fit import fit_saturation
from shardwise.facts.gpus import FLOAT8_CAPABILITY
from shardwise.internals.functions import scaled_matmul
from shardwise.metrics.clock import Clock, Work

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Tokens, and the widths of layers that are four times as wide as they are high.
_TOKENS = {"cuda": 8192, "cpu": 512}
_WIDTHS = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (64, 128, 256, 512)}
# Tokens and width at which other formats are compared, and the formats that are only emulated. A
# CPU without bf16 takes a thousand times as long for it.
_COMMON = {"cuda": (8192, 4096), "cpu": (512, 256)}
_EMULATED = (32, 64)


def measure_matmul(clock: Clock, base: str, computes: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Points of the base format at all widths, then of the other formats at one width."""
    device = clock.device
    for width in _WIDTHS[device.type]:
        tokens = _TOKENS[device.type]
        work = linear_work(device, DTYPES[base], tokens, width, 4 * width)
        yield _point(clock, base, tokens, width, work)
    common = _COMMON[device.type]
    for name, dtype in DTYPES.items():
        tokens, width = common if name in computes else _EMULATED
        if name != base:
            work = linear_work(device, dtype, tokens, width, 4 * width)
            yield _point(clock, name, tokens, width, work)
    if why_no_float8(device) is None:
        tokens, width = common
        work = float8_work(device, tokens, width, 4 * width)
        yield _point(clock, "fp8", tokens, width, work)


def fit_matmul(points: Sequence[dict[str, Any]], base: str) -> tuple[dict[str, float], float]:
    """(FLOP/s of large matmuls by format, half width)."""
    curve = [(point["width"], point["flops"]) for point in points if point["format"] == base]
    limit, half = fit_saturation(curve)
    found = {base: limit}
    for point in points:
        if point["format"] != base:
            found[point["format"]] = point["flops"] * (1 + half / point["width"])
    return found, half


def why_no_float8(device: torch.device) -> str | None:
    """None where the device computes float8."""
    if device.type != "cuda":
        return "CPUs have no float8 arithmetic"
    if torch.version.hip is not None:
        return "AMD GPUs use other float8 formats"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FLOAT8_CAPABILITY:
        return f"compute capability {major}.{minor} is below 8.9"
    return None


def _point(clock: Clock, name: str, tokens: int, width: int, work: Work) -> dict[str, Any]:
    flops = 3 * 2.0 * tokens * width * 4 * width / clock.seconds(work)
    return {"format": name, "tokens": tokens, "width": width, "flops": flops}


def linear_work(
    device: torch.device, dtype: torch.dtype, tokens: int, wide_in: int, wide_out: int
) -> Work:
    """The three matmuls of a layer: forward, and backward to its input and to its weight."""
    inputs = torch.randn(tokens, wide_in, device=device).to(dtype)
    weight = torch.randn(wide_out, wide_in, device=device).to(dtype)
    outputs = inputs @ weight.T

    def work() -> None:
        torch.mm(inputs, weight.T)
        torch.mm(outputs, weight)
        torch.mm(outputs.T, inputs)

    return work


def float8_work(device: torch.device, tokens: int, wide_in: int, wide_out: int) -> Work:
    """The same three matmuls on tensors that are float8 already."""
    scale = torch.ones((), device=device)

    def operands(rows: int, inner: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        left = torch.randn(rows, inner, device=device).to(torch.float8_e4m3fn)
        right = torch.randn(columns, inner, device=device).to(torch.float8_e4m3fn)
        return left, right.T

    pairs = [
        operands(tokens, wide_in, wide_out),
        operands(tokens, wide_out, wide_in),
        operands(wide_out, tokens, wide_in),
    ]

    def work() -> None:
        for left, right in pairs:
            scaled_matmul(left, right, (scale, scale), torch.bfloat16, fast=True)

    return work
