"""Gradients of parameters that all ranks along the tensor axis keep whole, summed over these ranks.

FSDP2 reduces gradients over its own mesh, and knows nothing of these ranks. Each rank computes a
part of the gradient, in the format of the computation. The parts are summed in fp32 after the last
backward of a step, as FSDP2's shards, in few calls. All ranks receive the same bits, so the copies
stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.copies import shares_of
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.torchao_float8 import own_part

# Elements of one call.
_AT_ONCE = 2**26


class GradientSums:
    """Sums the gradients of one model's copies. Without a tensor axis it does nothing."""

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device) -> None:
        self._group = mesh.group("tensor")
        self._shares = shares_of(model) if self._group is not None else {}
        self._device = device

    def reduce(self) -> None:
        """Overwrite each gradient with the sum over the ranks. All ranks call this together."""
        for grads, shares in self._portions():
            parts = [
                g.to(self._device).float().flatten() * s for g, s in zip(grads, shares, strict=True)
            ]
            whole = torch.cat(parts)
            dist.all_reduce(whole, group=self._group)
            for grad, total in zip(grads, whole.split([g.numel() for g in grads]), strict=True):
                grad.copy_(total.view(grad.shape))

    def _portions(self) -> Iterator[tuple[list[Tensor], list[float]]]:
        """Gradients and what they count, as many as one call takes."""
        grads: list[Tensor] = []
        shares: list[float] = []
        for param, share in self._shares.items():
            if param.grad is None:
                continue
            grad = own_part(param.grad)
            if grads and sum(map(torch.numel, grads)) + grad.numel() > _AT_ONCE:
                yield grads, shares
                grads, shares = [], []
            grads.append(grad)
            shares.append(share)
        if grads:
            yield grads, shares
