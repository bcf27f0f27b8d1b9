"""The axes along which ranks work on one part of a batch together: their sizes, and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.config.schema import MeshConfig
from shardwise.errors import UserError
from shardwise.plan.decisions import Decisions

# Only these axes may have more than one rank so far.
SUPPORTED = ("site", "replicate", "pipeline", "shard", "context", "tensor", "expert")


@dataclass(frozen=True, slots=True)
class InnerAxes:
    """Ranks that share matmuls and sequences, and the parts that experts are dealt out in."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1

    @property
    def neighbours(self) -> int:
        """Ranks that compute a block together."""
        return self.tensor * self.context

    @property
    def ranks(self) -> int:
        """Ranks that work on one part of a batch together."""
        return self.neighbours * self.pipeline

    @property
    def num_used(self) -> int:
        """Axes that have more than one rank."""
        return sum(size > 1 for size in self.sizes.values())

    @property
    def sizes(self) -> dict[str, Any]:
        """The ranks of each axis, as `asdict` has them. A page asks ten thousand times, and that
        copies deeply."""
        return {
            "tensor": self.tensor,
            "context": self.context,
            "expert": self.expert,
            "pipeline": self.pipeline,
        }


def given_axes(mesh: MeshConfig) -> InnerAxes:
    """What the user gave; an axis that is left open has one rank."""
    sizes = {name: getattr(mesh, name) for name in InnerAxes().sizes}
    return InnerAxes(**{name: 1 if size == "auto" else size for name, size in sizes.items()})


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
    more = ("site", "pipeline", "context", "tensor", "expert")
    order = ("site", "replicate", "pipeline", "shard", "context", "tensor", "expert")
    sizes = {name: getattr(decided, name) for name in order}
    shown = [f"{name}={n}" for name, n in sizes.items() if n > 1 or name not in more]
    return " x ".join(shown)


def warn_of_axes(decided: Decisions, device: str) -> list[str]:
    """The warning for axes that ranks on one GPU were compared on, but no ranks over NCCL."""
    sizes = {name: getattr(decided, name) for name in InnerAxes().sizes}
    if device == "cpu":
        return []
    if sizes.pop("pipeline") > 1:
        return [
            f"mesh.pipeline={decided.pipeline} gave the losses of one process on CPU ranks, and "
            "has not run on GPUs yet: compare a short run with mesh.pipeline=1"
        ]
    used = {name: size for name, size in sizes.items() if size > 1}
    if not used:
        return []
    given = " and ".join(f"mesh.{name}={size}" for name, size in used.items())
    without = " ".join(f"mesh.{name}=1" for name in used)
    return [
        f"{given} gave the losses of one process on one GPU, and has not run on several yet: "
        f"compare a short run with {without}"
    ]
