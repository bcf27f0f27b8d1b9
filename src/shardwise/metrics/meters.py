"""Speed and memory of a window of steps."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from shardwise.facts.flops import flops_per_token, recompute_flops_per_token
from shardwise.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the device's dense peak: of the model's FLOPs, and with recompute counted."""

    mfu: float
    hfu: float


def efficiency(plan: Plan, tokens_per_s: float) -> Efficiency | None:
    """MFU and HFU at `tokens_per_s` on one device; None where its peak is not known."""
    peaks = plan.cluster.gpu.peak_flops if plan.cluster.gpu else {}
    peak = peaks.get(plan.param_dtype.value)
    if peak is None:
        return None
    seq_len = plan.config.data.seq_len
    useful = flops_per_token(plan.model, seq_len)
    share = {"none": 0.0, "selective": 0.0, "full": 1.0}.get(
        str(plan.checkpoint_activations.value), plan.checkpoint_activations.value
    )
    again = recompute_flops_per_token(plan.model, seq_len, float(share))
    return Efficiency(useful * tokens_per_s / peak, (useful + again) * tokens_per_s / peak)


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most that this rank held since the run began."""

    allocated: int
    reserved: int


def peak_memory(device: torch.device) -> PeakMemory:
    """From the CUDA allocator, or the process's resident set where there is no GPU."""
    if device.type == "cuda":
        return PeakMemory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return PeakMemory(resident, resident)
