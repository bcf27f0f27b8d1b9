"""The one order in which a model is changed: adapters, expert parallel, float8 or leaner MLPs,
leaner experts, shared experts, recompute, compile, offload of activations, shard, prefetch."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.errors import UserError
from shardwise.kernels.own import uses_own
from shardwise.model.blocks import UnitMap, find_units, is_norm, iter_modules
from shardwise.parallel.adapters import apply_adapters
from shardwise.parallel.comm import Carrier
from shardwise.parallel.compile import apply_compile
from shardwise.parallel.expert_parallel import (
    apply_expert_parallel,
    apply_shared_experts,
    dispatched_experts,
)
from shardwise.parallel.expert_pass import apply_experts
from shardwise.parallel.gated_mlp import apply_gated_mlp
from shardwise.parallel.head_norms import apply_head_norms
from shardwise.parallel.mesh import Mesh, build_mesh
from shardwise.parallel.offload import apply_offload
from shardwise.parallel.reduce_buffer import ReduceBuffer
from shardwise.parallel.remat import apply_remat
from shardwise.parallel.shard import apply_prefetch, apply_sharding
from shardwise.parallel.tensor import apply_tensor
from shardwise.parallel.torchao_float8 import apply_float8
from shardwise.plan.decisions import multiplies_experts
from shardwise.plan.float8_rules import is_float8
from shardwise.plan.planned import Plan
from shardwise.plan.stage_recompute import on_rank


def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh | None = None,
    carrier: Carrier | None = None,
    buffer: ReduceBuffer | None = None,
) -> UnitMap:
    """Change `model` in place as `plan` says; returns the units that were formed.

    Needs an initialised process group of the plan's world size. The model may be on meta (then
    allocate and fill it afterwards) or hold weights. FSDP2's gradient division is turned off:
    divide the loss by the global number of tokens instead. Collectives go through `carrier` where
    there is one, such as a timer, and gradients on their way to a reduce-scatter lie in `buffer`.
    """
    mesh = mesh or build_mesh(plan)
    apply_adapters(model, plan)
    if (group := mesh.group("expert")) is not None:
        apply_expert_parallel(model, plan, (carrier or Carrier()).all_to_all(group))
    shard = plan.settings.shard
    units = find_units(model, classes=shard.unit_classes, min_params=shard.unit_min_params)
    apply_float8(model, units, plan)
    blocks = [module for unit in units.blocks for module in iter_modules(model, unit)]
    if uses_own(plan) and not is_float8(plan.decided.linear):
        apply_gated_mlp(blocks)
    if mesh.group("tensor") is None:
        apply_head_norms(blocks)
    if mesh.group("expert") is None:
        _apply_own_experts(blocks, plan)
    apply_tensor(model, units, plan, mesh)
    shared = apply_shared_experts(model)
    # The compiler cuts a graph at experts that are dealt out, and shared ones are computed inside
    # the cut. It traces no checkpoint with a cut, so it compiles such blocks inside theirs.
    cut = [block for block in blocks if dispatched_experts(block)]
    if plan.decided.compile:
        apply_compile([*shared, *cut])
    stage = mesh.axes.place(mesh.world.rank)["pipeline"]
    apply_remat(blocks, on_rank(plan.decided, stage).checkpoint_activations)
    if plan.decided.compile:
        whole = [block for block in blocks if block not in cut]
        apply_compile([*whole, *_outer_norms(model, units)])
    apply_offload(blocks, plan.decided.offload_activations, torch.device(plan.cluster.device))
    apply_sharding(model, units, plan, mesh, carrier, buffer)
    apply_prefetch(model, units, plan)
    return units


def _apply_own_experts(blocks: list[nn.Module], plan: Plan) -> None:
    """Experts in float8, or those that save less."""
    if multiplies_experts(plan.decided):
        if not apply_experts(blocks, float8=True):
            raise UserError(
                "precision.experts=float8 changes no layer of this model",
                why="its experts compute neither SwiGLU nor gpt-oss's clamped form of it",
                fix="leave precision.experts out",
            )
    # The compiler knows grouped matmuls of bf16 only.
    elif uses_own(plan) and plan.decided.param_dtype == "bf16":
        apply_experts(blocks)


def _outer_norms(model: nn.Module, units: UnitMap) -> list[nn.Module]:
    """Norms outside the blocks, such as the last one. Without the compiler they read all tokens
    a dozen times."""
    outer = (unit for unit in units.units if not unit.is_block)
    return [module for unit in outer for module in iter_modules(model, unit) if is_norm(module)]
