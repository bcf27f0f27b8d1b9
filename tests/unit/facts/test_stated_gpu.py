"""GPUs that the catalogue does not know, as a user describes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.config.schema import ClusterConfig
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec, resolve_cluster
from shardwise.facts.gpus import find_gpu
from shardwise.facts.rates import rates_of
from shardwise.units import GIB

X1 = ClusterConfig(name="2x8xX1 Ultra", peak_tflops=400.0, gpu_gib=96.0, gpu_gbps=1600.0)


def test_a_described_gpu_is_a_gpu_like_any_other() -> None:
    cluster = resolve_cluster(X1)
    assert (cluster.world_size, cluster.device, cluster.device_name) == (16, "cuda", "X1 Ultra")
    assert cluster.memory_bytes == 96 * GIB
    assert cluster.peak_flops("bf16") == 400e12
    assert cluster.compute_formats == {"fp32", "bf16", "fp16"}
    assert cluster.fabric.inside.name == "PCIe"
    assert cluster.gpu is not None
    assert rates_of(cluster.gpu).memory_bytes_per_s < 1600e9
    assert ClusterSpec.from_dict(cluster.to_dict()) == cluster


def test_a_description_of_a_known_gpu_plans_as_the_catalogue_does() -> None:
    known = find_gpu("L40S")
    described = replace(
        X1, name="8xOther", peak_tflops=known.peak_flops["bf16"] / 1e12,
        gpu_gib=known.memory_bytes / GIB, gpu_gbps=known.memory_bandwidth / 1e9,
    )  # fmt: skip
    gpu = resolve_cluster(described).gpu
    assert gpu is not None
    assert gpu.memory_bytes == known.memory_bytes
    assert gpu.memory_bandwidth == pytest.approx(known.memory_bandwidth)
    assert gpu.peak_flops["bf16"] == pytest.approx(known.peak_flops["bf16"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peak_tflops": "auto"}, "is described without cluster.peak_tflops"),
        ({"gpu_gib": "auto"}, "is described without cluster.gpu_gib"),
        ({"gpu_gbps": "auto", "peak_tflops": "auto"}, "cluster.peak_tflops and cluster.gpu_gbps"),
        ({"name": "8xH100"}, "H100 is in the catalogue, so cluster.gpu_gib and cluster.gpu_gbps"),
        ({"name": "8xNVIDIA H100 80GB HBM3"}, "is in the catalogue"),
        ({"name": "2xCPU"}, "cluster.name=2xCPU names no GPU"),
        ({"name": "local"}, "cluster.name=local names no GPU"),
        ({"name": "8xTPU"}, "TPU is no GPU that shardwise trains on"),
        ({"name": "X1"}, "cannot read the cluster"),
        ({"gpu_gib": "auto", "gpu_gbps": "auto"}, "unknown GPU 'X1 Ultra'"),
    ],
)
def test_a_description_that_says_too_little_or_is_not_needed(
    change: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as caught:
        resolve_cluster(replace(X1, **change), {})
    assert says in str(caught.value)
