"""Which plans are worth comparing: the decision tree's answers in order, each in its variants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSpec
from shardwise.plan.axis_sizes import InnerAxes
from shardwise.plan.batch import choose_batch, micro_batch_candidates
from shardwise.plan.decisions import Choice, Choices, Decisions, Source
from shardwise.plan.exchange_bytes import outer_bytes
from shardwise.plan.gathers import choose_gathers, reshard_divides, reshard_error
from shardwise.plan.pipeline_rules import with_full_pipeline
from shardwise.plan.stage_cuts import in_stages, splits_backward
from shardwise.plan.stage_recompute import RECOMPUTE_MODES, heaviest, modes_in
from shardwise.plan.strategy_mesh import (
    MeshShape,
    complete_mesh,
    mesh_of_strategy,
    strategy_of_mesh,
    with_inner_axes,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh, and why the decision tree names it."""

    strategy: str
    mesh: MeshShape
    why: str
    source: Source
    recompute_allowed: bool = True


def mesh_candidates(config: RunConfig, cluster: ClusterSpec, axes: InnerAxes) -> list[Candidate]:
    """The answers of the decision tree in order, each followed by what to try when it does not
    fit."""
    found = [
        replace(
            each,
            mesh=replace(
                with_inner_axes(each.mesh, axes), site=config.sites_here, jobs=config.num_jobs
            ),
        )
        for each in _all_meshes(config, cluster, axes)
    ]
    usable = [each for each in found if each.source == "user" or reshard_divides(config, each.mesh)]
    if not usable:
        raise reshard_error(config, cluster.world_size)
    even = [each for each in usable if each.mesh.deals_out_evenly]
    if not even:
        raise _uneven_experts(usable[-1].mesh)
    return even


@dataclass(frozen=True, slots=True)
class StepForm:
    """How a candidate makes a step. A search sorts hundreds, and looks at some."""

    recompute: str | float
    micro_batch: int
    accumulation: int
    global_batch: int
    accumulate: str

    def of(self, on_mesh: Decisions) -> Decisions:
        """All decisions of the candidate in this form."""
        return replace(
            on_mesh,
            checkpoint_activations=self.recompute,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            global_batch=self.global_batch,
            accumulate=self.accumulate,
        )


def variants(
    config: RunConfig,
    model: ModelSpec,
    cluster: ClusterSpec,
    basis: Choices,
    candidate: Candidate,
) -> Iterator[Decisions]:
    """All decisions of a candidate: least recompute first, then the largest micro-batch."""
    decided = on_mesh(config, model, basis, candidate)
    return (form.of(decided) for form in step_forms(config, cluster, candidate))


def leanest(
    config: RunConfig,
    model: ModelSpec,
    cluster: ClusterSpec,
    basis: Choices,
    candidate: Candidate,
) -> list[Decisions]:
    """Of these the ones that take least memory: where none of them fits, no other does."""
    decided = on_mesh(config, model, basis, candidate)
    return [form.of(decided) for form in leanest_forms(config, cluster, candidate)]


def step_forms(config: RunConfig, cluster: ClusterSpec, candidate: Candidate) -> Iterator[StepForm]:
    """All forms of a candidate: least recompute first, then the largest micro-batch."""
    modes, micros = _modes(config, candidate), _micro_batches(config, cluster, candidate)
    return _forms(config, candidate, product(modes, micros))


def leanest_forms(
    config: RunConfig, cluster: ClusterSpec, candidate: Candidate
) -> Iterator[StepForm]:
    """Of these the ones that take least memory."""
    mode, ranks = _modes(config, candidate)[-1], candidate.mesh.data_ranks
    # The smallest micro-batch in one pass, and the smallest in several.
    smallest = {
        choose_batch(config.train, ranks, Choice(micro, "", "rule"))[0].value > 1: micro
        for micro in _micro_batches(config, cluster, candidate)
    }
    return _forms(config, candidate, [(mode, micro) for micro in smallest.values()])


def _micro_batches(config: RunConfig, cluster: ClusterSpec, candidate: Candidate) -> list[int]:
    ranks, seq_len = candidate.mesh.data_ranks, config.data.seq_len
    found = micro_batch_candidates(config.train, ranks, seq_len, cluster.device)
    return with_full_pipeline(config, found, ranks, candidate.mesh.pipeline)


def _modes(config: RunConfig, candidate: Candidate) -> tuple[str | float, ...]:
    if config.memory.checkpoint_activations != "auto":
        return (config.memory.checkpoint_activations,)
    if config.mesh.pipeline_recompute != "auto":
        return (heaviest(modes_in(config.mesh.pipeline_recompute)),)
    if splits_backward(config):
        return ("none",)
    return RECOMPUTE_MODES if candidate.recompute_allowed else ("none",)


def _forms(
    config: RunConfig, candidate: Candidate, ways: Iterable[tuple[str | float, int]]
) -> Iterator[StepForm]:
    """The forms for such ways to recompute and micro-batches."""
    mesh = candidate.mesh
    for mode, micro in ways:
        passes, batch = choose_batch(
            config.train, mesh.data_ranks, Choice(micro, "", "rule"), least=mesh.pipeline
        )
        for accumulate in _ways_to_accumulate(config, passes.value):
            yield StepForm(mode, micro, passes.value, batch.value, accumulate)


def on_mesh(config: RunConfig, model: ModelSpec, basis: Choices, candidate: Candidate) -> Decisions:
    """The decisions for a candidate's mesh, whatever the form of its step."""
    mesh, own_kernels = candidate.mesh, basis["kernels"].value == "own"
    gathers = choose_gathers(config, model, mesh, own_kernels=own_kernels)
    return replace(
        Decisions.of({**basis, **gathers}, config.data.seq_len),
        strategy=candidate.strategy,
        site=mesh.site,
        jobs=mesh.jobs,
        outer_bytes=outer_bytes(config),
        replicate=mesh.replicate,
        shard=mesh.shard,
        tensor=mesh.tensor,
        sequence_parallel=mesh.tensor > 1 and config.mesh.sequence_parallel,
        context=mesh.context,
        expert=mesh.expert,
        keeps_experts=mesh.expert > 1 and config.shard.keep_experts is True,
        **in_stages(config, model, mesh.pipeline),
    )


def _all_meshes(config: RunConfig, cluster: ClusterSpec, axes: InnerAxes) -> Iterator[Candidate]:
    # Ranks along the other axes are neighbours, and share a fast domain as one. Sites have the same
    # mesh.
    world = cluster.world_size // config.sites_here // axes.ranks
    domain = max(1, min(cluster.nvlink_domain // axes.neighbours, world))
    given = complete_mesh(config.mesh, world)
    strategy = config.shard.strategy
    if strategy != "auto":
        yield _given_strategy(strategy, given, world, domain)
        return
    if given is not None:
        name = strategy_of_mesh(given[0], given[1] * axes.context)
        reshard = mesh_of_strategy(name, world, given[1]).reshard_after_forward
        yield Candidate(name, MeshShape(*given, reshard), "mesh given", "user")
        return
    for answer in _decision_tree(world, domain, axes.context):
        yield answer
        if answer.mesh.reshard_after_forward and config.shard.reshard_after_forward == "auto":
            yield _keeping_parameters(answer)


def _decision_tree(world: int, domain: int, context: int) -> Iterator[Candidate]:
    if context > 1:
        mesh = MeshShape(world, 1, reshard_after_forward=True)
        why = "ranks that divide a sequence hold one copy together"
        yield Candidate(strategy_of_mesh(world, context), mesh, why, "rule")
        if world == 1:
            return
    else:
        alone = "a whole copy fits on one device: plain data parallelism has the least traffic"
        mesh = mesh_of_strategy("no_shard", world, domain)
        yield Candidate("no_shard", mesh, alone, "rule", world == 1)
    yield from _hybrid_meshes(world, domain)
    why = (
        "does not fit on one device; all ranks share one fast domain"
        if world <= domain
        else "a copy over fewer ranks does not fit"
    )
    yield Candidate("full_shard", mesh_of_strategy("full_shard", world, domain), why, "rule")


def _keeping_parameters(answer: Candidate) -> Candidate:
    """The same mesh with parameters kept gathered: it needs more memory, and gathers nothing
    twice."""
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


def _uneven_experts(mesh: MeshShape) -> UserError:
    ranks = mesh.num_shards * mesh.tensor
    return UserError(
        f"mesh.expert={mesh.expert} does not divide the {ranks} ranks of one copy of the model",
        why="each part of the experts lies on as many of them as the others",
        fix=f"write mesh.expert={gcd(mesh.expert, ranks)}, or mesh.shard=auto",
    )


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


def _ways_to_accumulate(config: RunConfig, passes: int) -> list[str]:
    """What is kept from one micro-batch to the next: both ways where the planner may decide."""
    if config.memory.accumulate != "auto":
        return [config.memory.accumulate]
    if passes == 1 or splits_backward(config):
        return ["unsharded"]
    return ["unsharded", "sharded"]
