"""Optimizers of torch that need whole matrices, over the shards of FSDP2.

Each matrix is gathered, updated by torch's own optimizer on every rank alike, and each rank keeps
its rows. So the numbers do not depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise.parallel.torchao_float8 import own_part
from shardwise.plan.planned import Plan
from shardwise.training.optim import ShardAdamW, param_groups

MOMENTUM = 0.95


def build_whole(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """The optimizer that the plan names, which is not AdamW."""
    optim, groups = plan.settings.optim, param_groups(model, plan)
    if plan.decided.optimizer == "adafactor":
        return ShardAdafactor(groups, lr=optim.lr)
    matrices = _matrices(model)
    parts = [
        {**group, "params": params, "orthogonal": orthogonal}
        for group in groups
        for orthogonal in (True, False)
        if (params := [p for p in group["params"] if (p in matrices) is orthogonal])
    ]
    return MuonAdamW(parts, lr=optim.lr, betas=optim.betas, eps=optim.eps)


def _matrices(model: nn.Module) -> set[Tensor]:
    """What Muon is made for: matrices between the embeddings and the head."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()  # type: ignore[operator]
    ends = tables | ({head.weight} if isinstance(head, nn.Module) else set())
    return {p for p in model.parameters() if p.requires_grad and p.dim() == 2 and p not in ends}


class MuonAdamW(ShardAdamW):
    """torch's Muon for groups of matrices with `orthogonal`, and AdamW for all others.

    The momentum is sharded as the parameter is, and only its update is gathered.
    """

    def update_params(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Update parameters of one group from these gradients."""
        if not group["orthogonal"]:
            super().update_params(group, params, grads)
            return
        for param, grad in zip(params, grads, strict=True):
            state = self.state[param]
            if not state:
                # AdamW counts the updates of every parameter.
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state["momentum_buffer"] = torch.zeros_like(param)
            state["step"] += 1
            moment, update = own_part(state["momentum_buffer"]), grad.clone()
            moment.lerp_(own_part(grad), 1 - MOMENTUM)
            own_part(update).lerp_(moment, MOMENTUM)  # Nesterov's
            direction = _orthogonal(_whole(update))
            own = own_part(param)
            own.mul_(1 - group["lr"] * group["weight_decay"])
            own.add_(_part_of(direction, param), alpha=group["lr"])


class ShardAdafactor(torch.optim.Adafactor):
    """torch's Adafactor over gathered parameters and gradients. Its state is small, and every rank
    has all of it."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param)

    def _update(self, group: dict[str, Any], param: Tensor) -> None:
        names = ("lr", "beta2_decay", "eps", "d", "weight_decay")
        whole = _whole(param).detach()
        whole.grad = _whole(param.grad)
        one = torch.optim.Adafactor([whole], **{name: group[name] for name in names})
        one.state[whole] = self.state[param]
        one.step()
        own_part(param).copy_(_part_of(whole, param))


def _orthogonal(update: Tensor) -> Tensor:
    """What torch's Muon adds to a matrix at a rate of 1, scaled as AdamW's updates usually are, so
    that rates and decay for AdamW suit it."""
    moved = torch.zeros_like(update)
    moved.grad = update
    alone = torch.optim.Muon(
        [moved],
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )
    alone.step()
    return moved


def _whole(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("a parameter without a gradient is not updated")
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part_of(whole: Tensor, param: Tensor) -> Tensor:
    """The rows of a whole tensor that this rank has of a parameter. Nothing is sent."""
    if not isinstance(param, DTensor):
        return whole
    mesh = param.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=param.placements).to_local()
