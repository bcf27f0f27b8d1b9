"""The GPU that a cluster's name means: the catalogue's, or one that the user describes."""

from __future__ import annotations

from shardwise.config.schema import ClusterConfig
from shardwise.errors import UserError
from shardwise.facts.gpus import GpuSpec, find_gpu, match_gpu, validate_cuda
from shardwise.units import GIB

# What a plan needs to know of a GPU, and an example of each.
_NEEDED = {"peak_tflops": "400", "gpu_gib": "96", "gpu_gbps": "1600"}
# A description of the catalogue's own would be ignored; its peak alone may be corrected.
_ONLY_STATED = ("gpu_gib", "gpu_gbps")


def gpu_named(kind: str, count: str, config: ClusterConfig) -> GpuSpec:
    """The GPU of this name, behind a `count` such as `4x8x`.

    Of one that is described, the links between two are taken as PCIe, and the peak holds for the
    format that the run computes in; float8 takes more than one figure.
    """
    described = [name for name in _ONLY_STATED if getattr(config, name) != "auto"]
    if not described:
        return find_gpu(kind, count)
    validate_cuda(kind)
    known = match_gpu(kind)
    if known is not None:
        raise UserError(
            f"{kind} is in the catalogue, so {_words(described)} would be ignored",
            fix=f"leave {_words(described)} out, or give the GPU another name: "
            f"cluster.name={count}My-{known.name}",
        )
    missing = [name for name in _NEEDED if getattr(config, name) == "auto"]
    if missing:
        raise UserError(
            f"{kind} is not in the catalogue, and is described without {_words(missing)}",
            why="a plan needs its peak in TFLOP/s, its memory in GiB and the GB/s of its memory",
            fix=f"write {' '.join(f'cluster.{name}={_NEEDED[name]}' for name in missing)}",
        )
    peak = 1e12 * float(config.peak_tflops)
    return GpuSpec(
        name=kind,
        memory_bytes=round(float(config.gpu_gib) * GIB),
        peak_flops={"fp32": peak, "bf16": peak, "fp16": peak},
        memory_bandwidth=1e9 * float(config.gpu_gbps),
    )


def validate_not_described(config: ClusterConfig) -> None:
    """Raise where a GPU is described, and the cluster's name stands for none."""
    described = [name for name in _ONLY_STATED if getattr(config, name) != "auto"]
    if described:
        raise UserError(
            f"cluster.name={config.name} names no GPU that {_words(described)} could describe",
            why="what this machine has is probed",
            fix=f"leave {_words(described)} out, or write cluster.name=8xKIND",
        )


def _words(names: list[str]) -> str:
    return " and ".join(f"cluster.{name}" for name in names)
