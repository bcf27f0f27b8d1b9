"""The rates that a device reaches: matmul, attention and memory, and the cost of a launch.

Catalogue figures are shares of the vendor's peak that large, well-shaped work reaches, by published
measurements and our own on an H200. `shardwise plan --calibrate` replaces them by measurements of
this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shardwise.facts.gpus import GpuSpec

# Tokens; see Rates.half_context.
_HALF_CONTEXT = 400.0
_HALF_CONTEXT_HOPPER = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one device under training's kind of load."""

    matmul_flops: Mapping[str, float] = field(hash=False)
    """FLOP/s of large matmuls by format."""

    half_width: float
    """A matmul whose narrowest side is this wide reaches half of that."""

    attention_forward_flops: float
    """FLOP/s of causal attention over a long sequence; masked scores are not counted."""

    attention_backward_flops: float
    half_context: float = _HALF_CONTEXT
    """A sequence of this length reaches half of both: the triangle's edge is computed in whole
    tiles."""

    memory_bytes_per_s: float
    """Bytes per second of element-wise work, reads and writes together."""

    launch_s: float
    """Host time that one kernel launch takes; short kernels wait for it."""

    source: Literal["catalogue", "measured"] = "catalogue"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rates:
        """Back from `to_dict`."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class _Shares:
    """Shares of the peak: matmul, matmul in float8, attention forward and backward, memory."""

    matmul: float
    float8: float
    forward: float
    backward: float
    memory: float


# What training reaches, which is less than a matmul alone in a loop. H200: measured by us at 8B
# shapes; like all Hopper and Blackwell cards it runs into its power limit in long steps. B200 and
# MI300X: what published runs of torchtitan and prime-rl leave after their own overheads. These ran
# early kernels, and a tuned stack may reach a quarter more.
_GENERATIONS = {
    "V100": _Shares(0.75, 0.0, 0.28, 0.22, 0.80),
    "T4": _Shares(0.45, 0.0, 0.22, 0.17, 0.75),
    "A100": _Shares(0.85, 0.0, 0.68, 0.57, 0.82),
    "H100": _Shares(0.71, 0.70, 0.66, 0.55, 0.85),
    "H200": _Shares(0.73, 0.74, 0.66, 0.55, 0.88),
    "GH200": _Shares(0.73, 0.74, 0.66, 0.55, 0.88),
    # The same chips with slower links.
    "A800": _Shares(0.85, 0.0, 0.68, 0.57, 0.82),
    "H800": _Shares(0.71, 0.70, 0.66, 0.55, 0.85),
    # Its clock and power would allow far more than its peak, so that matmuls come near to it. Not
    # measured.
    "H20": _Shares(0.90, 0.88, 0.70, 0.60, 0.85),
    "B200": _Shares(0.60, 0.55, 0.55, 0.45, 0.80),
    "GB200": _Shares(0.60, 0.55, 0.55, 0.45, 0.80),
    "MI300X": _Shares(0.38, 0.27, 0.24, 0.18, 0.70),
    # Not measured: as their predecessors.
    "B300": _Shares(0.60, 0.55, 0.55, 0.45, 0.80),
    "GB300": _Shares(0.60, 0.55, 0.55, 0.45, 0.80),
    "MI325X": _Shares(0.38, 0.27, 0.24, 0.18, 0.70),
    "MI355X": _Shares(0.38, 0.27, 0.24, 0.18, 0.70),
    # GeForce cards clock higher than their nominal peaks assume (an RTX 4090 at 2.7 GHz instead of
    # 2.52), and their tensor cores, which add up in fp32 at half their rate, leave power over.
    "RTX-3090": _Shares(0.95, 0.0, 0.70, 0.60, 0.85),
    "RTX-4090": _Shares(0.98, 0.90, 0.75, 0.65, 0.85),
    "RTX-5090": _Shares(0.98, 0.90, 0.70, 0.60, 0.85),
    # Cards with the full rate, GDDR and little power reach about 0.75 TFLOP/s a watt: 229 were
    # measured of an RTX PRO 6000 at 300 W. So this is 300 W, 350 W and 72 W of their peaks.
    "RTX-6000-Ada": _Shares(0.62, 0.60, 0.55, 0.47, 0.85),
    "RTX-PRO-6000": _Shares(0.75, 0.70, 0.60, 0.50, 0.85),
    "RTX-PRO-6000-Server": _Shares(0.75, 0.70, 0.60, 0.50, 0.85),
    "L40S": _Shares(0.72, 0.67, 0.60, 0.50, 0.85),
    "L4": _Shares(0.45, 0.42, 0.40, 0.34, 0.85),
}
_OTHER = _Shares(0.78, 0.72, 0.64, 0.54, 0.85)
# Their tensor cores are faster, so the edge of the causal triangle takes a larger share of a short
# sequence's time.
_SINCE_HOPPER = ("H100", "H200", "H800", "H20", "GH200", "B200", "GB200", "B300", "GB300")


def rates_of(gpu: GpuSpec) -> Rates:
    """The catalogue's rates of a GPU."""
    family = gpu.name if gpu.name in _GENERATIONS else gpu.name.split("-")[0]
    shares = _GENERATIONS.get(family, _OTHER)
    peaks = gpu.peak_flops
    half = max(peaks.get("bf16", 0.0), peaks.get("fp16", 0.0))
    matmul = {fmt: shares.matmul * peak for fmt, peak in peaks.items() if fmt != "fp8"}
    if "fp8" in peaks:
        matmul["fp8"] = shares.float8 * peaks["fp8"]
    return Rates(
        matmul_flops=matmul,
        half_width=180.0,
        attention_forward_flops=shares.forward * half,
        attention_backward_flops=shares.backward * half,
        half_context=_HALF_CONTEXT_HOPPER if family in _SINCE_HOPPER else _HALF_CONTEXT,
        memory_bytes_per_s=shares.memory * gpu.memory_bandwidth,
        launch_s=6e-6,
    )
