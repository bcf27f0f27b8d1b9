"""The memory that the first step leaves behind in the allocator."""

from __future__ import annotations

import torch


def give_back(device: torch.device) -> None:
    """Return what the allocator reserves and does not use, and begin to look for the peak anew.

    Compilation, trials of the loss, FSDP2's first all-gathers and Adam's first state leave free
    blocks in the pools of several streams, where later steps cannot use them. On an H200 as rank 0
    of 8 that was 0.3 to 4 GiB for dense models and 10 of 60 GiB for GLM-4.5-Air.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
