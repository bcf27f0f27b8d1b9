"""Experts as units of FSDP2 on a mesh of their own, gathered together with their block.

FSDP2 would gather them where they are called. That is inside what recompute runs again, and there
selective recompute counts operators: a gather that came ahead of time in forward, and does not now,
would be one operator too many. So a block asks for its experts before its own forward, and before
its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardwise.parallel.comm import reduce_alone
from shardwise.parallel.expert_parallel import dispatched_experts
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placement import placement_over
from shardwise.parallel.precision import unit_policy
from shardwise.plan.planned import Plan


def shard_experts(
    blocks: Sequence[nn.Module], plan: Plan, mesh: Mesh, common: dict[str, Any]
) -> None:
    """Shard the dispatched experts of blocks over the ranks that keep the same ones. `common` is
    what FSDP2 is told for all units."""
    over = mesh.fsdp_over_experts
    # Weights of experts stay in the router's dtype, as where experts are part of their block.
    policy = replace(unit_policy(plan), cast_forward_inputs=False)
    for block in blocks:
        experts = dispatched_experts(block)
        for module in experts:
            fully_shard(
                module,
                reshard_after_forward=plan.decided.frees_experts,
                shard_placement_fn=placement_over(over["shard"].size()),
                mp_policy=policy,
                **{**common, "mesh": over},
            )
            if over.size() == 1:
                # There is nothing to sum, and FSDP2 would divide all gradients by 1.
                reduce_alone(cast(FSDPModule, module), plan)
        if experts:
            _gather_with(block, [cast(FSDPModule, module) for module in experts])


def _gather_with(block: nn.Module, experts: list[FSDPModule]) -> None:
    def gather(*_: Any) -> None:
        for module in experts:
            module.unshard()

    def gather_before_backward(module: nn.Module, inputs: Any, output: Any) -> None:
        for each in output if isinstance(output, tuple) else (output,):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(gather)

    block.register_forward_pre_hook(gather)
    block.register_forward_hook(gather_before_backward)
