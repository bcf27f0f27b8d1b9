"""Speed and memory of a window of steps."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from shardwise.facts.flops import Efficiency, efficiency_of
from shardwise.plan.planned import Plan
from shardwise.plan.stage_recompute import share_recomputed


def efficiency(plan: Plan, tokens_per_s: float) -> Efficiency | None:
    """MFU and HFU at `tokens_per_s` on one device; None where its peak is not known."""
    peak = plan.cluster.peak_flops(plan.decided.param_dtype)
    if peak is None:
        return None
    again = share_recomputed(plan.decided)
    return efficiency_of(plan.model, plan.settings.data.seq_len, again, tokens_per_s, peak)


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most that this rank held since the run began."""

    allocated: int
    reserved: int


def peak_memory(device: torch.device) -> PeakMemory:
    """The peak from the CUDA allocator, or the process's resident set where there is no GPU."""
    if device.type == "cuda":
        return PeakMemory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return PeakMemory(resident, resident)
