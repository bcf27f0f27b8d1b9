"""Norms that each head of a block has for itself, as one.

StableLM 2 splits a tensor into its heads, sends each through a LayerNorm of its own, and joins
them again. The compiler makes a kernel of each of forty norms. Here all heads are normalised at
once, and a stack of the norms' weights multiplies them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from shardwise.internals.functions import with_children
from shardwise.model.override import override_forward

# Of the small norms that a module is tried with.
_SMALL = 4


def apply_head_norms(blocks: list[nn.Module]) -> None:
    """Let the norms of all heads of a tensor be one, where that is what a module computes."""
    modules = [module for block in blocks for module in block.modules()]
    override_forward([each for each in modules if is_norm_by_head(each)], "AtOnce", lambda _: _all)


def is_norm_by_head(module: nn.Module) -> bool:
    """Whether a module has nothing but a norm for each head, and its own code over small ones
    computes what `_all` does."""
    norms = _norms_of(module)
    if norms is None:
        return False
    with torch.random.fork_rng(devices=[]):
        small = [_small_norm(norm) for norm in norms]
    own = with_children(module, {_name_of(module): nn.ModuleList(small)})
    x = torch.linspace(-2, 2, 2 * len(norms) * 3 * _SMALL).view(2, len(norms), 3, _SMALL).sin()
    try:
        found = own(x)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    is_plain = isinstance(found, Tensor) and found.is_cpu and found.shape == x.shape
    return is_plain and torch.allclose(found, _all(own, x), atol=1e-6)


def _all(self: nn.Module, x: Tensor) -> Tensor:
    """All heads, which are the second dimension of `x`, through their norms."""
    norms: Any = next(iter(self.children()))
    made = layer_norm(x.float(), (x.shape[-1],), eps=norms[0].eps)
    made = made * torch.stack([norm.weight for norm in norms]).float()[:, None]
    if norms[0].bias is not None:
        made = made + torch.stack([norm.bias for norm in norms]).float()[:, None]
    return made.to(x.dtype)


def _norms_of(module: nn.Module) -> list[nn.LayerNorm] | None:
    """The norms in the only child of a module, where they differ in nothing but their numbers."""
    children = list(module.children())
    if len(children) != 1 or not isinstance(children[0], nn.ModuleList):
        return None
    norms = [each for each in children[0] if type(each) is nn.LayerNorm]
    if len(norms) < 2 or len(norms) < len(children[0]):
        return None
    kinds = {(each.normalized_shape, each.eps, each.bias is None) for each in norms}
    has_weights = all(isinstance(each.weight, nn.Parameter) for each in norms)
    has_rows = len(norms[0].normalized_shape) == 1
    return norms if len(kinds) == 1 and has_weights and has_rows else None


def _name_of(module: nn.Module) -> str:
    return next(name for name, _ in module.named_children())


def _small_norm(norm: nn.LayerNorm) -> nn.LayerNorm:
    made = nn.LayerNorm(_SMALL, eps=norm.eps, bias=norm.bias is not None)
    for parameter in made.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return made
