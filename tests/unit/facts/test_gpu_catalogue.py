import json

import pytest

from shardwise.errors import UserError
from shardwise.facts.gpus import GPUS, GpuSpec, find_gpu, match_gpu
from shardwise.facts.rates import rates_of
from shardwise.units import GIB


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Server"),
        ("AMD Instinct MI325X", "MI325X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("a100", "A100-80GB"),
        ("rtx 3090", "RTX-3090"),
        ("h100", "H100"),
    ],
)
def test_real_and_casual_names_are_known(device_name: str, name: str) -> None:
    assert find_gpu(device_name).name == name


@pytest.mark.parametrize(
    "device_name",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10", ""],
)
def test_near_names_are_other_devices(device_name: str) -> None:
    assert match_gpu(device_name) is None


def test_unknown_name_says_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        find_gpu("H1000")
    assert "H100" in caught.value.fix


def test_bf16_only_where_the_chip_has_it() -> None:
    without = {gpu.name for gpu in GPUS if "bf16" not in gpu.compute_formats}
    assert without == {"V100-16GB", "V100-32GB", "V100-PCIe-16GB", "V100-PCIe-32GB", "T4"}
    assert find_gpu("V100").compute_formats == {"fp32", "fp16"}


def test_float8_only_since_ada_and_hopper() -> None:
    without = {gpu.name.split("-")[0] for gpu in GPUS if "fp8" not in gpu.compute_formats}
    assert without == {"V100", "T4", "A10G", "A100", "A800", "RTX"}
    assert {
        name: "fp8" in find_gpu(name).compute_formats for name in ("3090", "4090", "A6000")
    } == {
        "3090": False,
        "4090": True,
        "A6000": False,
    }


def test_catalogue_is_sane() -> None:
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        assert gpu.peak_flops["fp16"] > gpu.peak_flops["fp32"]
        assert gpu.peak_flops.get("fp8", 1e18) > gpu.peak_flops["fp16"]
        assert 14 * GIB < gpu.memory_bytes < 300 * GIB
        assert gpu.nvlink_domain == 1 or gpu.nvlink_bandwidth is not None
    assert find_gpu("H100").peak_flops["bf16"] == 989.4e12
    assert find_gpu("H100").nvlink_bandwidth == 450e9


@pytest.mark.parametrize("name", ["TPUv5p", "v5e", "trn2", "Gaudi3"])
def test_what_is_no_cuda_device_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(UserError, match="no GPU that shardwise trains on") as caught:
        find_gpu(name)
    assert caught.value.why


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_has_rates_for_its_formats(gpu: GpuSpec) -> None:
    rates = rates_of(gpu)
    for fmt, peak in gpu.peak_flops.items():
        assert 0.25 * peak < rates.matmul_flops[fmt] < peak


def test_json_round_trip() -> None:
    for gpu in GPUS:
        assert GpuSpec.from_dict(json.loads(json.dumps(gpu.to_dict()))) == gpu
