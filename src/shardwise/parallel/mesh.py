"""The device mesh of a plan."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import ExitCode, UserError
from shardwise.plan.plan import Plan


def build_mesh(plan: Plan) -> DeviceMesh:
    """1-D (`shard`) where there is one copy of the model, else 2-D (`replicate`, `shard`)."""
    validate_world_size(plan, dist.get_world_size())
    device = plan.cluster.device
    if plan.replicate.value == 1:
        return init_device_mesh(device, (plan.shard.value,), mesh_dim_names=("shard",))
    shape = (plan.replicate.value, plan.shard.value)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def validate_world_size(plan: Plan, world: int) -> None:
    """Raise where a launcher has started another number of ranks than the plan is for."""
    if world != plan.world_size:
        raise UserError(
            f"the plan is for {plan.world_size} ranks, but {world} were started",
            why=f"mesh replicate={plan.replicate.value} x shard={plan.shard.value}",
            fix=f"start {plan.world_size} ranks, or write the cluster that was started as "
            "cluster.name=NODESxGPUSxKIND",
            code=ExitCode.ENVIRONMENT,
        )
