"""Which sizes the axes of a mesh may have: every rule, each with its error and its fix.

The planner proposes only what no rule refuses, and a user who asks for anything else gets the
rule's error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.models import ModelSpec
from shardwise.plan.axis_sizes import InnerAxes, given_axes, validate_supported
from shardwise.plan.context import check_context
from shardwise.plan.expert import check_expert
from shardwise.plan.pipeline_rules import check_pipeline
from shardwise.plan.tensor_suits import check_tensor


@dataclass(frozen=True, slots=True)
class Question:
    """Axes that somebody wants to use, and for what."""

    axes: InnerAxes
    config: RunConfig
    """The run's, whatever its mesh says of these axes."""

    model: ModelSpec
    hf_config: Mapping[str, Any]
    world: int

    @property
    def about(self) -> tuple[RunConfig, ModelSpec, Mapping[str, Any]]:
        """The configuration as if the user had given these axes, and the model."""
        mesh = replace(self.config.mesh, **self.axes.sizes)
        return replace(self.config, mesh=mesh), self.model, self.hf_config


Rule = Callable[[Question], Iterator[UserError]]


def axes_error(asked: Question) -> UserError | None:
    """The error of the first rule that refuses these axes; None where none does."""
    return next((error for rule in RULES for error in rule(asked)), None)


def validate_axes(
    config: RunConfig, model: ModelSpec, hf_config: Mapping[str, Any], world: int
) -> None:
    """Raise where the axes that the user gave do not fit the ranks, the model or the data."""
    error = axes_error(Question(given_axes(config.mesh), config, model, hf_config, world))
    if error is not None:
        raise error


def _supported(asked: Question) -> Iterator[UserError]:
    try:
        validate_supported(asked.axes.sizes)
    except UserError as error:
        yield error


def _divides_sites(asked: Question) -> Iterator[UserError]:
    config, sites = asked.config, asked.config.num_sites
    setting = "cluster.datacenters" if config.mesh.site == "auto" else "mesh.site"
    if asked.world % config.sites_here:
        yield UserError(
            f"{setting}={sites} does not divide {asked.world} ranks",
            why="each site has as many ranks as the others",
            fix=f"write {setting}={_largest_divisor(sites, asked.world)}, or as many ranks for "
            "each",
        )
    elif sites > 1 and asked.axes.num_used:
        used = [f"mesh.{name}" for name, size in asked.axes.sizes.items() if size > 1]
        yield UserError(
            f"{' and '.join(used)} with {sites} sites were not tried",
            why="only replicate and shard were compared inside sites so far",
            fix=f"write {' '.join(f'{name}=1' for name in used)}, or {setting}=1",
        )
    elif sites > 1 and config.diloco.fragments > asked.model.num_layers:
        layers = asked.model.num_layers
        yield UserError(
            f"diloco.fragments={config.diloco.fragments}, but {asked.model.name} has {layers} "
            "blocks",
            why="each fragment has some of the blocks",
            fix=f"write diloco.fragments={_largest_divisor(layers, config.diloco.steps)}",
        )


def _divides_world(asked: Question) -> Iterator[UserError]:
    axes, world = asked.axes, asked.world // asked.config.sites_here
    if world % axes.ranks == 0:
        return
    if axes.pipeline > 1:
        yield UserError(
            f"mesh.pipeline={axes.pipeline} x mesh.tensor={axes.tensor} x "
            f"mesh.context={axes.context} does not divide {world} ranks",
            why="every rank sits at one place of the mesh, so the product of the axes is the world "
            "size",
            fix=f"write mesh.tensor=1 mesh.context=1 "
            f"mesh.pipeline={_largest_divisor(axes.pipeline, world)}",
        )
        return
    if world % axes.context:
        sizes = f"mesh.context=1 mesh.tensor={_largest_divisor(axes.tensor, world)}"
    else:
        sizes = f"mesh.tensor={_largest_divisor(axes.tensor, world // axes.context)}"
    yield UserError(
        f"mesh.tensor={axes.tensor} x mesh.context={axes.context} does not divide {world} ranks",
        why="every rank sits at one place of the mesh, so the product of the axes is the world "
        "size",
        fix=f"write {sizes}",
    )


def _divides_blocks(asked: Question) -> Iterator[UserError]:
    yield from check_tensor(*asked.about)


def _deals_experts(asked: Question) -> Iterator[UserError]:
    expert, model = asked.axes.expert, asked.model
    if expert == 1:
        return
    if model.num_experts == 1:
        yield UserError(
            f"mesh.expert={expert}, but {model.name} has no experts",
            why="expert parallelism deals out the experts of a mixture",
            fix="write mesh.expert=1, or mesh.expert=auto",
        )
    elif model.num_experts % expert or asked.world % expert:
        fits = _largest_divisor(expert, model.num_experts, asked.world)
        yield UserError(
            f"mesh.expert={expert} does not divide the {model.num_experts} experts of "
            f"{model.name} over {asked.world} ranks",
            why="each part has as many experts as the others, and lies on as many ranks",
            fix=f"write mesh.expert={fits}, or mesh.expert=auto",
        )
    else:
        yield from check_expert(*asked.about)


def _divides_into_stages(asked: Question) -> Iterator[UserError]:
    yield from check_pipeline(*asked.about)


def _divides_sequences(asked: Question) -> Iterator[UserError]:
    yield from check_context(*asked.about)


def _updates_whole_matrices(asked: Question) -> Iterator[UserError]:
    optim = asked.config.optim
    cut = [name for name in ("tensor", "expert") if getattr(asked.axes, name) > 1]
    if optim.gathers_matrices and cut:
        yield UserError(
            f"optim.name={optim.name} with several ranks along `{cut[0]}` was not tried",
            why="it updates whole matrices, and ranks along that axis have parts of them",
            fix=f"write {' '.join(f'mesh.{name}=1' for name in cut)}, or optim.name=adamw",
        )


RULES: tuple[Rule, ...] = (
    _supported,
    _divides_sites,
    _divides_world,
    _divides_into_stages,
    _divides_blocks,
    _deals_experts,
    _divides_sequences,
    _updates_whole_matrices,
)


def _largest_divisor(below: int, *of: int) -> int:
    """The largest size up to `below` that divides all of them."""
    return next(size for size in range(below, 0, -1) if all(n % size == 0 for n in of))
