"""Which meshes a model can be spread over: every rule about the size of an axis is here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.config.schema import MeshConfig, RunConfig
from shardwise.errors import UserError
from shardwise.facts.models import ModelSpec
from shardwise.plan.context import check_context
from shardwise.plan.decisions import Decisions
from shardwise.plan.expert import check_expert
from shardwise.plan.tensor import check_tensor

# Only these axes may have more than one rank so far.
SUPPORTED = ("replicate", "shard", "context", "tensor", "expert")


def validate_supported(sizes: Mapping[str, int]) -> None:
    """Raise where an axis has several ranks that nothing here can use yet."""
    for name, size in sizes.items():
        if size > 1 and name not in SUPPORTED:
            raise UserError(
                f"the mesh has {size} ranks along `{name}`, which is not supported",
                why=f"only {' and '.join(SUPPORTED)} may have more than one rank",
                fix="write mesh.replicate=auto mesh.shard=auto, which take all ranks",
            )


def mesh_in_words(decided: Decisions) -> str:
    """The sizes of all axes, those of one rank left out beside the first two."""
    more = ("context", "tensor", "expert")
    sizes = {name: getattr(decided, name) for name in ("replicate", "shard", *more)}
    shown = [f"{name}={n}" for name, n in sizes.items() if n > 1 or name not in more]
    return " x ".join(shown)


def inner_ranks(mesh: MeshConfig) -> int:
    """Ranks that work on one part of a batch together."""
    return mesh.tensor * mesh.context


def validate_axes(
    config: RunConfig, model: ModelSpec, hf_config: Mapping[str, Any], world: int
) -> None:
    """Raise where the axes that the user gave do not fit the ranks, the model or the data."""
    mesh = config.mesh
    given = {"tensor": mesh.tensor, "context": mesh.context, "expert": mesh.expert}
    validate_supported(given)
    inner = inner_ranks(mesh)
    if world % inner:
        raise UserError(
            f"mesh.tensor={mesh.tensor} x mesh.context={mesh.context} does not divide {world} "
            "ranks",
            why="every rank sits at one place of the mesh, so the product of the axes is the "
            "world size",
            fix=f"write {_divisors('mesh.tensor', world // mesh.context or 1, mesh.tensor)}"
            if world % mesh.context == 0
            else f"write mesh.context=1 {_divisors('mesh.tensor', world, mesh.tensor)}",
        )
    for check in (check_tensor, check_context, check_expert):
        for error in check(config, model, hf_config):
            raise error


def _divisors(path: str, of: int, below: int) -> str:
    """Sizes to write instead: the nearest ones that divide."""
    sizes = [size for size in range(1, below + 1) if of % size == 0]
    return f"{path}={sizes[-1]}"
