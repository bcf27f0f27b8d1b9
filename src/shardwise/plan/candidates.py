"""Which plans are worth comparing: the decision tree's answers in order, each with its layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.batch import choose_batch, micro_batch_candidates
from shardwise.plan.float8 import choose_float8_gather, counts_as_float8
from shardwise.plan.layout import Layout
from shardwise.plan.mesh import MeshShape, complete_mesh, mesh_of_strategy, strategy_of_mesh
from shardwise.plan.plan import Choice, Source

RECOMPUTE_MODES: tuple[str | float, ...] = ("none", "selective", 0.25, 0.5, 0.75, "full")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh, and why the decision tree names it."""

    strategy: str
    mesh: MeshShape
    why: str
    source: Source
    recompute_allowed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Decisions that depend on neither mesh nor batch."""

    param_dtype: str
    reduce_dtype: str
    compile: bool
    offload: bool
    loss_chunk_tokens: int | None
    linear: str
    flash_attention_4: bool
    own_kernels: bool
    balances_routers: bool


def mesh_candidates(config: RunConfig, cluster: ClusterSpec) -> list[Candidate]:
    """The decision tree, each answer followed by what to try when it does not fit."""
    found = list(_all_meshes(config, cluster))
    usable = [each for each in found if each.source == "user" or reshard_divides(config, each.mesh)]
    if not usable:
        raise reshard_error(config, cluster.world_size)
    return usable


def layouts(
    config: RunConfig,
    model: ModelSpec,
    cluster: ClusterSpec,
    common: Common,
    candidate: Candidate,
) -> Iterator[Layout]:
    """Least recompute first, then the largest micro-batch."""
    modes = RECOMPUTE_MODES
    if config.memory.checkpoint_activations != "auto":
        modes = (config.memory.checkpoint_activations,)
    elif not candidate.recompute_allowed:
        modes = ("none",)
    micros = micro_batch_candidates(
        config.train, cluster.world_size, config.data.seq_len, cluster.device
    )
    gather = choose_float8_gather(config, model, candidate.mesh.shard).value
    for mode, micro in product(modes, micros):
        passes = choose_batch(config.train, cluster.world_size, Choice(micro, "", "rule"))[0].value
        for unsharded in _ways_to_accumulate(config, passes):
            yield Layout(
                replicate=candidate.mesh.replicate,
                shard=candidate.mesh.shard,
                keeps_gathered=choose_reshard(config, candidate.mesh).value is False,
                param_dtype=common.param_dtype,
                reduce_dtype=common.reduce_dtype,
                checkpoint_activations=mode,
                compile=common.compile,
                offload=common.offload,
                offload_activations=config.memory.offload_activations,
                micro_batch=micro,
                accumulation=passes,
                seq_len=config.data.seq_len,
                loss_chunk_tokens=common.loss_chunk_tokens,
                accumulates_unsharded=unsharded,
                float8=counts_as_float8(common.linear, model),
                float8_gather=gather,
                float8_rowwise=common.linear == "float8_rowwise",
                flash_attention_4=common.flash_attention_4,
                bf16_state=config.optim.state == "bf16",
                own_kernels=common.own_kernels,
                balances_routers=common.balances_routers,
                gathers_in_place=choose_gather_in_place(
                    config, candidate.mesh, own_kernels=common.own_kernels
                ).value,
            )


def choose_reshard(config: RunConfig, mesh: MeshShape) -> Choice[bool | int]:
    """What happens to gathered parameters after forward."""
    given = config.shard.reshard_after_forward
    if given != "auto":
        if not reshard_divides(config, mesh):
            raise reshard_error(config, mesh.shard)
        return Choice(given, "given", "user")
    if mesh.reshard_after_forward:
        return Choice(True, "frees gathered parameters, which backward gathers again", "rule")
    return Choice(False, "keeps gathered parameters for backward: one all-gather less", "rule")


def choose_gather_in_place(
    config: RunConfig, mesh: MeshShape, *, own_kernels: bool
) -> Choice[bool]:
    """Whether each parameter is gathered where it is used."""
    shard, reshard = config.shard, choose_reshard(config, mesh).value
    if shard.gather_in_place != "auto":
        if shard.gather_in_place and not isinstance(reshard, bool):
            raise UserError(
                f"shard.gather_in_place does not go with shard.reshard_after_forward={reshard}",
                why="backward gathers from fewer ranks than forward, whose shards lie otherwise",
                fix="leave shard.gather_in_place out, or write shard.reshard_after_forward=true, "
                "or shard.reshard_after_forward=false",
            )
        return Choice(shard.gather_in_place, "given", "user")
    if mesh.shard == 1:
        return Choice(False, "nothing is gathered", "rule")
    if not isinstance(reshard, bool):
        return Choice(False, "backward gathers from fewer ranks than forward", "rule")
    if shard.forward_prefetch == 0 or shard.all_gather_limit == 1:
        return Choice(False, "it is hidden only where units are gathered ahead", "rule")
    if not own_kernels:
        return Choice(False, "measured beside our own kernels only", "rule")
    return Choice(True, "saves the copy of what was gathered into parameters", "rule")


def reshard_divides(config: RunConfig, mesh: MeshShape) -> bool:
    """Whether a given integer splits the shard axis into equal groups."""
    given = config.shard.reshard_after_forward
    if given == "auto" or isinstance(given, bool):
        return True
    return given < mesh.shard and mesh.shard % given == 0


def reshard_error(config: RunConfig, ranks: int) -> UserError:
    """The error for one that does not."""
    smaller = max((size for size in range(2, ranks) if ranks % size == 0), default=None)
    groups = [*([] if smaller is None else [f"{smaller}"]), "true", "false"]
    return UserError(
        f"shard.reshard_after_forward={config.shard.reshard_after_forward} does not divide the "
        f"shard axis of {ranks} ranks into smaller groups",
        fix=f"write {', or '.join(f'shard.reshard_after_forward={group}' for group in groups)}",
    )


def _all_meshes(config: RunConfig, cluster: ClusterSpec) -> Iterator[Candidate]:
    world, domain = cluster.world_size, min(cluster.nvlink_domain, cluster.world_size)
    given = complete_mesh(config.mesh, world)
    strategy = config.shard.strategy
    if strategy != "auto":
        yield _given_strategy(strategy, given, world, domain)
        return
    if given is not None:
        name = strategy_of_mesh(*given)
        reshard = mesh_of_strategy(name, world, given[1]).reshard_after_forward
        yield Candidate(name, MeshShape(*given, reshard), "mesh given", "user")
        return
    for answer in _decision_tree(world, domain):
        yield answer
        if answer.mesh.reshard_after_forward and config.shard.reshard_after_forward == "auto":
            yield _keeping_parameters(answer)


def _decision_tree(world: int, domain: int) -> Iterator[Candidate]:
    alone = "a whole copy fits on one device: plain data parallelism has the least traffic"
    yield Candidate(
        "no_shard", mesh_of_strategy("no_shard", world, domain), alone, "rule", world == 1
    )
    yield from _hybrid_meshes(world, domain)
    why = (
        "does not fit on one device; all ranks share one fast domain"
        if world <= domain
        else "a copy over fewer ranks does not fit"
    )
    yield Candidate("full_shard", mesh_of_strategy("full_shard", world, domain), why, "rule")


def _keeping_parameters(answer: Candidate) -> Candidate:
    """The same mesh with memory spent on traffic: nothing is gathered twice."""
    return replace(
        answer,
        strategy="shard_grad_op" if answer.strategy == "full_shard" else answer.strategy,
        mesh=replace(answer.mesh, reshard_after_forward=False),
    )


def _hybrid_meshes(world: int, domain: int) -> Iterator[Candidate]:
    sizes = [size for size in range(domain, world, domain) if world % size == 0]
    for smaller, size in zip([None, *sizes], sizes, strict=False):
        if smaller is None:
            why = (
                f"several nodes: shard inside {size} GPUs, so that only the gradient all-reduce "
                "crosses replicas"
            )
        else:
            why = f"a copy over {smaller} GPUs does not fit; {size} do"
        mesh = mesh_of_strategy("hybrid_shard", world, size)
        yield Candidate("hybrid_shard", mesh, why, "rule")


def _given_strategy(
    strategy: str, given: tuple[int, int] | None, world: int, domain: int
) -> Candidate:
    mesh = mesh_of_strategy(strategy, world, domain)
    if given is not None and strategy == "hybrid_shard":
        mesh = MeshShape(*given, mesh.reshard_after_forward)
    if given is not None and given != (mesh.replicate, mesh.shard):
        raise UserError(
            f"shard.strategy={strategy} is a mesh of replicate={mesh.replicate} x "
            f"shard={mesh.shard}, but the mesh section says {given[0]} x {given[1]}",
            why=f"with {world} ranks {strategy} leaves no choice of axes",
            fix="write mesh.replicate=auto mesh.shard=auto, or shard.strategy=hybrid_shard",
        )
    return Candidate(strategy, mesh, "given", "user")


def _ways_to_accumulate(config: RunConfig, passes: int) -> list[bool]:
    """Whether whole gradients are kept over micro-batches; both where the planner may decide."""
    if passes == 1 or config.memory.accumulate == "sharded":
        return [False]
    return [True] if config.memory.accumulate == "unsharded" else [True, False]
