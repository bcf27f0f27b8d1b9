"""The experts of a mixture, where a family has them in one module for each block.

Such a module is called with hidden states, the experts of each token, and their weights. Nothing
else declares it, so it is known by the parameters of its forward.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """One module of experts."""

    module: nn.Module
    argument: str
    """The name of its second argument, which holds the experts of each token."""

    num_experts: int


def find_experts(model: nn.Module) -> list[ExpertStack]:
    """All modules of experts, in the order of the model; none for a dense model."""
    found = []
    for module in model.modules():
        num_experts = _num_experts(module)
        if num_experts is None:
            continue
        names = list(inspect.signature(module.forward).parameters)
        # transformers' families call it `top_k_index` or `router_indices`.
        if len(names) == 3 and "ind" in names[1]:
            found.append(ExpertStack(module, names[1], num_experts))
    return found


def _num_experts(module: nn.Module) -> int | None:
    """As the module says, or as many matrices as its largest stack has."""
    said = getattr(module, "num_experts", None)
    stacks = [len(each) for each in module.parameters(recurse=False) if each.dim() == 3]
    return said if isinstance(said, int) else max(stacks, default=None)
