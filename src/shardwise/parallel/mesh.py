"""Where the ranks of a job are: the world, the mesh, and who works with whom.

Only this module asks torch.distributed which rank this is and how many there are. All others ask a
`Mesh`, or a `World` where there is no plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import ExitCode, UserError
from shardwise.model.sequence_split import SequenceSplit
from shardwise.parallel.axes import (
    AXES,
    BATCH_AXES,
    DATA_AXES,
    FACTORS,
    LOSS_AXES,
    STEP_AXES,
    TOKEN_AXES,
    Axes,
)
from shardwise.plan.axis_sizes import mesh_in_words, validate_supported
from shardwise.plan.planned import Plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of a job, as one of them sees them."""

    rank: int
    size: int
    local_rank: int
    group: ProcessGroup

    @classmethod
    def joined(cls) -> World:
        """The world whose process group this process has joined."""
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no process group: join one first")
        rank = dist.get_rank()
        # Without a launcher all ranks are on one node.
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(rank, dist.get_world_size(), local_rank, group)

    @property
    def is_first(self) -> bool:
        """Whether this rank decides and writes for all."""
        return self.rank == 0

    @property
    def is_first_of_node(self) -> bool:
        """Whether this rank does the work that its node needs once."""
        return self.local_rank == 0

    def beside(self, backend: str) -> World:
        """The same ranks in a separate process group, whose collectives run beside those of this
        one.

        All ranks call this together.
        """
        return replace(self, group=dist.new_group(backend=backend))

    def gather(self, mine: T) -> list[T]:
        """The values of all ranks, by rank. All ranks call this together, as they do the next
        two."""
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def share(self, mine: T) -> T:
        """The first rank's value, on every rank."""
        given = [mine]
        dist.broadcast_object_list(given, src=0, group=self.group)
        return given[0]

    def decide(self, act: Callable[[], T]) -> T:
        """The result of `act` on the first rank, on every rank. Its UserError is raised on every
        rank."""
        outcome: Any = None
        if self.is_first:
            try:
                outcome = act()
            except UserError as error:
                outcome = error
        outcome = self.share(outcome)
        if isinstance(outcome, UserError):
            raise outcome
        result: T = outcome
        return result


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a plan: the place of this one, and the groups that it works in."""

    axes: Axes
    world: World
    devices: DeviceMesh
    """Its axes are `shard`, and all others that have more than one rank. Ranks along `context` hold
    parts of the same parameters, so there they are part of `shard`."""

    fsdp: DeviceMesh
    """What FSDP2 shards over: `shard` of `devices`, and `replicate` where there are replicas."""

    experts: DeviceMesh | None
    """The same ranks for parameters of experts, with the axes `shard` and `expert`, and `replicate`
    where there are replicas; None where every rank gathers all experts."""

    axis_groups: Mapping[str, ProcessGroup]
    """The group of every axis that has more than one rank."""

    loss_group: ProcessGroup
    """The ranks that add up a loss."""

    token_group: ProcessGroup
    """The ranks that add up what is counted by token, such as the use of experts."""

    router_group: ProcessGroup
    """The ranks whose routers see different tokens. Where tokens travel to experts, those along
    `tensor` have divided them before."""

    step_group: ProcessGroup
    """The ranks that make one step together, and so agree on what to do next."""

    eval_group: ProcessGroup
    """The ranks that add up the losses of an evaluation."""

    jobs: int = 1
    """Jobs that share a global batch, each of them a site."""

    job: int = 0
    """Which of them this one is."""

    @property
    def eval_degree(self) -> int:
        """The number of parts of an evaluation, of which each job makes its own."""
        return self.axes.size(*DATA_AXES)

    @property
    def eval_rank(self) -> int:
        """The part that this rank evaluates."""
        return self.axes.index(self.world.rank, *DATA_AXES)

    @property
    def data_degree(self) -> int:
        """The number of parts of a global batch. Each job has as large a share as the others."""
        return self.jobs * self.eval_degree

    @property
    def data_rank(self) -> int:
        """The part that this rank reads."""
        return self.job * self.eval_degree + self.eval_rank

    @property
    def batch_ranks(self) -> tuple[int, ...]:
        """The ranks that read the same part as this one, including itself."""
        return self.axes.ranks_along(self.world.rank, *BATCH_AXES)

    @property
    def counts_batch(self) -> bool:
        """Whether this rank counts the tokens of its part, for all ranks that read the same."""
        return self.axes.index(self.world.rank, *BATCH_AXES) == 0

    @property
    def counts_eval(self) -> bool:
        """Whether this rank counts its tokens, for all ranks of `eval_group` that read the same."""
        return self.axes.index(self.world.rank, "pipeline", "context") == 0

    @property
    def token_rank(self) -> int:
        """A number that ranks with the same tokens share."""
        size = self.axes.size(*DATA_AXES, "context")
        return self.job * size + self.axes.index(self.world.rank, *DATA_AXES, "context")

    @property
    def split(self) -> SequenceSplit | None:
        """How this rank divides sequences with others; None where it has whole ones."""
        group = self.group("context")
        if group is None:
            return None
        rank = self.axes.place(self.world.rank)["context"]
        return SequenceSplit(rank, self.axes.context, group.group_name)

    @property
    def replicas(self) -> ProcessGroup | None:
        """The ranks that hold the same shards as this one; None without others."""
        return self.group("replicate")

    @property
    def clip_group(self) -> ProcessGroup | None:
        """Ranks that sum one norm in several orders, and must agree on it; None where all ranks
        sum alike."""
        several = self.axes.size("pipeline", "tensor", "expert") > 1
        return self.step_group if several else self.replicas

    @property
    def groups(self) -> list[ProcessGroup]:
        """The group of the world and those of every axis."""
        groups = [self.world.group, *self.devices.get_all_groups(), *self.axis_groups.values()]
        groups += [] if self.experts is None else self.experts.get_all_groups()
        return list(dict.fromkeys(groups))

    def group(self, axis: str) -> ProcessGroup | None:
        """The ranks along one axis; None where this rank is alone on it."""
        return self.axis_groups.get(axis)

    @property
    def fsdp_over_experts(self) -> DeviceMesh:
        """What FSDP2 shards the parameters of experts over."""
        if self.experts is None:
            return self.fsdp
        return _without(self.experts, "pipeline", "expert")


def build_mesh(plan: Plan) -> Mesh:
    """The mesh of a plan. All ranks call this together, after they have joined a process group."""
    decided = plan.decided
    axes = Axes(
        site=decided.site,
        replicate=decided.replicate,
        pipeline=decided.pipeline,
        shard=decided.shard,
        context=decided.context,
        tensor=decided.tensor,
        expert=decided.expert,
    )
    world = World.joined()
    validate_supported(asdict(axes))
    validate_world_size(plan, world.size)
    mesh = lay_out(axes, world, plan.cluster.device)
    return replace(mesh, jobs=decided.jobs, job=plan.settings.diloco.site)


def lay_out(axes: Axes, world: World, device: str) -> Mesh:
    """Place the ranks of `world` along `axes`."""
    factors = [name for name in FACTORS if name != "context"]
    sizes = {name: axes.size(name) for name in factors} | {"shard": axes.size("shard", "context")}
    devices = _mesh_of(device, sizes)
    experts = _expert_mesh(device, axes) if axes.expert > 1 else None

    def group_along(wanted: Sequence[str]) -> ProcessGroup:
        along = [name for name in wanted if axes.size(name) > 1]
        if axes.size(*along) == world.size:
            return world.group
        if len(along) == 1:
            return group_of(along[0])
        return _make_group(tuple({axes.ranks_along(rank, *along) for rank in range(world.size)}))

    def group_of(name: str) -> ProcessGroup:
        if name == "expert" and experts is not None:
            return experts.get_group(name)
        if name == "context" or (name == "shard" and axes.context > 1):
            return _make_group(tuple({axes.ranks_along(r, name) for r in range(world.size)}))
        return devices.get_group(name)

    loss, tokens, step = map(group_along, (LOSS_AXES, TOKEN_AXES, STEP_AXES))
    evaluates = group_along(("site", *LOSS_AXES)) if axes.site > 1 else loss
    travels = axes.expert > 1 and axes.tensor > 1
    routers = group_along((*TOKEN_AXES, "tensor")) if travels else tokens
    groups = {name: group_of(name) for name in AXES if axes.size(name) > 1}
    fsdp = _without(devices, *(name for name in FACTORS if name not in ("replicate", "shard")))
    return Mesh(axes, world, devices, fsdp, experts, groups, loss, tokens, routers, step, evaluates)


def _make_group(parts: tuple[tuple[int, ...], ...]) -> ProcessGroup:
    """This rank's group, where all ranks are divided into `parts`."""
    group: ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration([list(part) for part in sorted(parts)])
    return group


def _mesh_of(
    device: str, sizes: Mapping[str, int], always: Sequence[str] = ("shard",)
) -> DeviceMesh:
    """A mesh of `always` and of all other axes that have more than one rank."""
    kept = {name: size for name, size in sizes.items() if size > 1 or name in always}
    return init_device_mesh(device, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _expert_mesh(device: str, axes: Axes) -> DeviceMesh:
    """The ranks of `shard`, `context` and `tensor` anew: neighbours have other experts."""
    inner = axes.size("shard", "context", "tensor")
    outer = {name: axes.size(name) for name in ("site", "replicate", "pipeline")}
    sizes = {**outer, "shard": inner // axes.expert, "expert": axes.expert}
    return _mesh_of(device, sizes, ("shard", "expert"))


def _without(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """The mesh of the axes that are left; `mesh` itself where it has none of `names`."""
    kept = tuple(name for name in mesh.mesh_dim_names or () if name not in names)
    return mesh if kept == mesh.mesh_dim_names else mesh[kept]


def validate_world_size(plan: Plan, world: int) -> None:
    """Raise where a launcher has started another number of ranks than the plan is for."""
    if world != plan.world_size:
        raise UserError(
            f"the plan is for {plan.world_size} ranks, but {world} were started",
            why=f"mesh {mesh_in_words(plan.decided)}",
            fix=f"start {plan.world_size} ranks, or write the cluster that was started as "
            "cluster.name=NODESxGPUSxKIND",
            code=ExitCode.ENVIRONMENT,
        )
