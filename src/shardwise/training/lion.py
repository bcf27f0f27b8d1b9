"""Lion: each number moves by the learning rate, in the direction of a mean of gradients.

From "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023). As with AdamW, no number
depends on another, so each rank updates its own parts and nothing is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.torchao_float8 import own_part
from shardwise.plan.planned import Plan
from shardwise.training.optim import param_groups


class ShardLion(torch.optim.Optimizer):
    """Its state is one moment. It has the name of Adam's first, because it is cut and stored as
    that one is."""

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param, param.grad)

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        own, gradient, mean = own_part(param), own_part(grad), own_part(state["exp_avg"])
        for_update, for_mean = group["betas"]
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.add_(mean.lerp(gradient, 1 - for_update).sign_(), alpha=-group["lr"])
        mean.lerp_(gradient, 1 - for_mean)


def build_lion(model: nn.Module, plan: Plan) -> ShardLion:
    """Lion over what is trained."""
    optim = plan.settings.optim
    return ShardLion(param_groups(model, plan), lr=optim.lr, betas=optim.betas)
