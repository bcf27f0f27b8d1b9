"""The rows of experts: one for each token and each of its experts, sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor


def sort_by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the order of rows by expert, the expert of each row then, where each of a token's rows is
    then, where experts end)."""
    # A GPU sorts bytes in one pass, and int64 in eight.
    narrow = torch.uint8 if count <= 256 else torch.int16
    by_expert, order = chosen.reshape(-1).to(narrow).sort(stable=True)
    row = torch.arange(len(order), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, row).view(chosen.shape)
    experts = torch.arange(count, device=order.device, dtype=torch.int32)
    ends = torch.searchsorted(by_expert.int(), experts, right=True, out_int32=True)
    return order, by_expert, places, ends
