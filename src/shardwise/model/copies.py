"""Parameters that all ranks of the tensor axis keep whole, as equal copies.

Each rank computes a part of the gradient of most of them: from its own tokens, or from its own
heads. Their gradient is the sum over the ranks. Of others each rank computes all of it, and the
mean keeps the copies equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from shardwise.model.cuts import own_cuts

_SHARE = "shardwise_gradient_share"


def mark_shares(modules: Iterable[nn.Module], share: float) -> None:
    """Remember what a rank's gradient of the modules' own parameters counts in the sum."""
    for module in modules:
        setattr(module, _SHARE, share)


def shares_of(model: nn.Module) -> dict[Tensor, float]:
    """What a rank's gradient counts, of each parameter that all ranks keep whole."""
    return {
        param: module.__dict__[_SHARE]
        for module in model.modules()
        if _SHARE in module.__dict__
        for name, param in module.named_parameters(recurse=False)
        if name not in own_cuts(module)
    }
