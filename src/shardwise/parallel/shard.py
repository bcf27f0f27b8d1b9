"""fully_shard over the units, the root last, and the order of prefetching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from shardwise.internals.byte_params import allow_bytes
from shardwise.internals.fsdp2 import replace_copy
from shardwise.internals.parts import COPIES, is_open
from shardwise.kernels.own import uses_own
from shardwise.kernels.unit_copies import chunk_cat
from shardwise.model.blocks import Unit, UnitMap, iter_modules
from shardwise.model.packed import is_packed
from shardwise.parallel.comm import Carrier, apply_carrier, reduce_alone
from shardwise.parallel.expert_parallel import dispatched_experts
from shardwise.parallel.expert_units import shard_experts
from shardwise.parallel.gather import copy_unless_there, gathers_in_place, keep_shards
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placement import placement_over
from shardwise.parallel.precision import root_policy, unit_policy
from shardwise.parallel.reduce_buffer import ReduceBuffer
from shardwise.plan.planned import Plan
from shardwise.plan.rank_share import num_shards
from shardwise.plan.unit_sizes import uses_in_place


def apply_sharding(
    model: nn.Module,
    units: UnitMap,
    plan: Plan,
    mesh: Mesh,
    carrier: Carrier | None = None,
    buffer: ReduceBuffer | None = None,
) -> None:
    """Shard every unit, then the root with what is left. Collectives go through `carrier`, and
    gradients through `buffer`, where there is one."""
    _replace_copies(plan)
    if any(map(is_packed, model.parameters())):
        allow_bytes()
    common: dict[str, Any] = {
        "mesh": mesh.fsdp,
        "offload_policy": _offload_policy(plan),
        "ignored_params": _used_in_place(model, plan),
    }
    blocks = [module for unit in units.blocks for module in iter_modules(model, unit)]
    shard_experts(blocks, plan, mesh, common)
    # A unit inside another one comes first: FSDP2 gives the outer one what is left.
    for unit in sorted(units.units, key=_depth, reverse=True):
        modules = list(iter_modules(model, unit))
        reshard, only_forward = _reshard(unit, units, plan), _is_for_forward(modules, model)
        fully_shard(
            modules[0] if len(modules) == 1 else modules,
            reshard_after_forward=reshard,
            shard_placement_fn=_placement(reshard, plan),
            mp_policy=unit_policy(plan),
            **common,
        )
        if only_forward:
            cast(FSDPModule, modules[0]).set_unshard_in_backward(False)
    # By default FSDP2 keeps the root gathered after forward, because its backward comes first.
    fully_shard(
        model,
        shard_placement_fn=placement_over(num_shards(plan.decided)),
        mp_policy=root_policy(plan),
        **common,
    )
    if mesh.fsdp.size() == 1:
        for module in sharded_modules(model):
            # There is nothing to sum, and FSDP2 would divide all gradients by 1.
            reduce_alone(module, plan)
    apply_carrier(model, units, plan, mesh, carrier, buffer)
    if mesh.fsdp.size() == 1:
        return
    for module in sharded_modules(model):
        # The loss is already divided by the global token count, so gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def apply_prefetch(model: nn.Module, units: UnitMap, plan: Plan) -> None:
    """Name the units to gather ahead, where the plan wants another order than FSDP2's own."""
    order = [_gathered_with(next(iter_modules(model, unit))) for unit in units.units]
    forward, backward = plan.decided.forward_prefetch, plan.decided.backward_prefetch
    for index, (module, *experts) in enumerate(order):
        if not isinstance(module, FSDPModule):
            continue
        if forward > 0:
            module.set_modules_to_forward_prefetch(_sharded(order[index + 1 : index + 1 + forward]))
        if backward != 1 or plan.decided.expert > 1:
            earlier = order[max(0, index - backward) : index][::-1]
            # A unit that names itself gathers nothing ahead: this is how FSDP2 is told 0.
            module.set_modules_to_backward_prefetch(_sharded(earlier) or [module])
        for each in _sharded([experts]):
            each.set_modules_to_backward_prefetch([each])


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """All modules that carry an FSDP state, the root among them."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard_all(model: nn.Module) -> None:
    """Free parameters that a forward without backward left gathered, so that they are shards
    again."""
    for module in sharded_modules(model):
        module.reshard()


def _used_in_place(model: nn.Module, plan: Plan) -> set[nn.Parameter]:
    """Frozen weights that FSDP2 leaves alone: with a shard axis of one rank it would copy them
    before each use, and it has no gradients of theirs to reduce."""
    if not uses_in_place(plan.model, plan.decided):
        return set()
    return {param for param in model.parameters() if not param.requires_grad}


def _replace_copies(plan: Plan) -> None:
    """Replace the copies around collectives by ours, where such a run uses them."""
    device, in_place = plan.cluster.device, gathers_in_place(plan)
    has_kernels = uses_own(plan) and is_open(COPIES)
    if has_kernels:
        replace_copy("chunk_cat", chunk_cat, device)
    if in_place:
        replace_copy("all_gather_copy_in", keep_shards, device)
    if in_place or (has_kernels and plan.decided.offload_activations):
        replace_copy("split_with_sizes_copy", copy_unless_there, device)


def _depth(unit: Unit) -> int:
    return max(name.count(".") for name in unit.modules)


def _reshard(unit: Unit, units: UnitMap, plan: Plan) -> bool | int:
    """Whether a unit is freed after forward. Backward needs the last unit of forward first, so
    that one is kept."""
    ends_forward = not unit.is_block and (unit is units.units[-1] or len(unit.modules) > 1)
    return False if ends_forward else plan.decided.reshard_after_forward


def _is_for_forward(modules: list[nn.Module], model: nn.Module) -> bool:
    """Whether backward does not need the unit's parameters, so that it need not gather them.

    The gradient of a lookup needs the tokens alone. A table that is also the head is another
    matter.
    """
    if any(_family_class(module) is not nn.Embedding for module in modules):
        return False
    tables = {module.weight for module in modules}
    users = [m for m in model.modules() if tables.intersection(m.parameters(recurse=False))]
    return len(users) == len(modules)


def _family_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before a part of the table was all that it has."""
    cls: type[nn.Module] = vars(type(module)).get("overridden", type(module))
    return cls


def _placement(reshard: bool | int, plan: Plan) -> Callable[[nn.Parameter], Shard] | None:
    """The placement of parameters. FSDP2 can reshard only rows to a smaller group, so dim 0 is
    cut there, whatever its padding."""
    return placement_over(num_shards(plan.decided)) if isinstance(reshard, bool) else None


def _offload_policy(plan: Plan) -> OffloadPolicy:
    if not plan.decided.offload:
        return OffloadPolicy()
    # Page-locked memory only matters where a GPU copies from it.
    pin = plan.settings.memory.pin_memory and plan.cluster.device == "cuda"
    return CPUOffloadPolicy(pin_memory=pin)


def _gathered_with(module: nn.Module) -> list[nn.Module]:
    """The first module of a unit, and the experts that are units of their own inside it."""
    return [module, *(each for each in dispatched_experts(module) if each is not module)]


def _sharded(units: Sequence[Sequence[nn.Module]]) -> list[FSDPModule]:
    return [module for unit in units for module in unit if isinstance(module, FSDPModule)]
