"""Strategy names are turned into a mesh and a reshard rule here, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.config.schema import MeshConfig
from shardwise.errors import UserError
from shardwise.plan.axis_sizes import InnerAxes, given_axes

# Sharding another dim than the first costs one more copy at every all-gather and reduction. A
# little padding is cheaper than that.
MAX_PADDING = 0.1


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Ranks on each axis, and whether gathered parameters are freed after forward."""

    replicate: int
    shard: int
    reshard_after_forward: bool
    tensor: int = 1
    context: int = 1
    expert: int = 1
    site: int = 1
    pipeline: int = 1
    jobs: int = 1

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences, if all jobs were like this one."""
        return self.jobs * self.site * self.replicate * self.shard

    @property
    def num_shards(self) -> int:
        """Ranks that hold one copy together: those of a context group hold parts of the same
        parameters."""
        return self.shard * self.context

    @property
    def deals_out_evenly(self) -> bool:
        """Whether each part of the experts lies on as many ranks of a copy."""
        return self.num_shards * self.tensor % self.expert == 0


def mesh_of_strategy(strategy: str, world: int, domain: int) -> MeshShape:
    """The mesh that a strategy's name means."""
    shapes = {
        "full_shard": MeshShape(1, world, True),
        "shard_grad_op": MeshShape(1, world, False),
        "hybrid_shard": MeshShape(world // domain, domain, True),
        "no_shard": MeshShape(world, 1, False),
    }
    return shapes[strategy]


def strategy_of_mesh(replicate: int, shards: int) -> str:
    """The name of a mesh whose copies lie on so many ranks."""
    if shards == 1:
        return "no_shard"
    return "full_shard" if replicate == 1 else "hybrid_shard"


def with_inner_axes(shape: MeshShape, axes: InnerAxes) -> MeshShape:
    """The same with the axes along which ranks share a batch."""
    return replace(shape, **axes.sizes)


def padding(num_rows: int, num_shards: int) -> float:
    """Padding rows that FSDP2 adds to make shards equal, as a share of the rows."""
    return -num_rows % num_shards / num_rows if num_rows else 0.0


def complete_mesh(mesh: MeshConfig, world: int) -> tuple[int, int] | None:
    """Sizes of replicate and shard where the user gave at least one. Their product must be `world`:
    the ranks that the other axes leave."""
    if mesh.replicate == "auto" and mesh.shard == "auto":
        return None
    replicate = world // mesh.shard if mesh.replicate == "auto" else mesh.replicate  # type: ignore[operator]
    shard = world // mesh.replicate if mesh.shard == "auto" else mesh.shard  # type: ignore[operator]
    if replicate * shard != world:
        raise UserError(
            f"mesh.replicate={mesh.replicate} x mesh.shard={mesh.shard} does not give "
            f"{_ranks(mesh, world)}",
            why="every rank sits at one place of the mesh, so the product is the world size",
            fix=_whole_meshes(mesh, world),
        )
    return replicate, shard


def _ranks(mesh: MeshConfig, world: int) -> str:
    axes = given_axes(mesh)
    inner = [
        f"mesh.{name}" for name in ("pipeline", "context", "tensor") if getattr(axes, name) > 1
    ]
    inner += [] if mesh.site in ("auto", 1) else ["mesh.site"]
    return f"{world} ranks" + (f", which {' and '.join(inner)} leave" if inner else "")


def _whole_meshes(mesh: MeshConfig, world: int) -> str:
    """Fixes: one axis as the user gave it and the other to match, or both left to the planner."""
    sizes = {"mesh.replicate": mesh.replicate, "mesh.shard": mesh.shard}
    kept = [
        f"{path}={size} {other}={world // size}"
        for (path, size), other in zip(sizes.items(), reversed(sizes), strict=True)
        if size != "auto" and world % size == 0
    ]
    open_mesh = "mesh.replicate=auto mesh.shard=auto"
    return f"write {', or '.join([*kept, open_mesh])}: the product must be {world}"
