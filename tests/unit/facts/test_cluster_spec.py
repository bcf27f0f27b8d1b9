import json
from pathlib import Path

import pytest

from shardwise.config.schema import ClusterConfig
from shardwise.errors import ExitCode, UserError
from shardwise.facts import probe
from shardwise.facts.cluster import ClusterSpec, parse_cluster, probe_cluster, resolve_cluster
from shardwise.facts.probe import probe_cpu
from shardwise.units import MIB

NO_GPUS = {"PATH": "/nowhere"}


@pytest.mark.parametrize(
    ("name", "num_nodes", "devices_per_node", "device_name"),
    [
        ("8xH100", 1, 8, "H100"),
        ("4x8xH100", 4, 8, "H100"),
        ("2x8xA100-40GB", 2, 8, "A100-40GB"),
        ("1xH200", 1, 1, "H200"),
        ("8Xh100", 1, 8, "H100"),
        ("4xRTX 4090", 1, 4, "RTX-4090"),
        (" 2 x 4 x l40s ", 2, 4, "L40S"),
    ],
)
def test_gpu_clusters(name: str, num_nodes: int, devices_per_node: int, device_name: str) -> None:
    cluster = parse_cluster(name)
    assert (cluster.num_nodes, cluster.devices_per_node) == (num_nodes, devices_per_node)
    assert cluster.world_size == num_nodes * devices_per_node
    assert cluster.device == "cuda"
    assert cluster.device_name == device_name
    assert cluster.gpu is not None
    assert cluster.memory_bytes == cluster.gpu.memory_bytes
    assert cluster.nvlink_domain == devices_per_node
    assert cluster.source == "named"


@pytest.mark.parametrize(("name", "shape"), [("2xCPU", (1, 2)), ("2x2xcpu", (2, 2))])
def test_cpu_clusters_share_this_machine(name: str, shape: tuple[int, int]) -> None:
    cluster, cpu = parse_cluster(name), probe_cpu()
    assert (cluster.num_nodes, cluster.devices_per_node) == shape
    assert cluster.device == "cpu"
    assert cluster.gpu is None
    assert cluster.memory_bytes == cpu.memory_bytes // cluster.world_size
    assert cluster.compute_formats == cpu.compute_formats


@pytest.mark.parametrize("name", ["H100", "", "x8xH100", "8x", "-8xH100", "8", "0xH100", "4x0xCPU"])
def test_unreadable_clusters_come_with_a_fix(name: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_cluster(name)
    assert "8xH100" in caught.value.fix


def test_unknown_gpu_in_a_cluster() -> None:
    with pytest.raises(UserError, match="unknown GPU 'H10'"):
        parse_cluster("8xH10")


@pytest.mark.parametrize(
    ("name", "domain"),
    [("18x4xGB200", 72), ("36x4xGB200", 72), ("4x4xGB200", 16), ("19x4xGB200", 4)],
)
def test_rack_links_reach_across_nodes(name: str, domain: int) -> None:
    assert parse_cluster(name).nvlink_domain == domain


def test_nvlink_domain_override() -> None:
    cluster = resolve_cluster(ClusterConfig(name="2x8xH100", nvlink_domain=4, datacenters=2), {})
    assert (cluster.nvlink_domain, cluster.datacenters) == (4, 2)
    for domain in (0, -8, 3, 32):
        with pytest.raises(UserError, match="nvlink_domain"):
            resolve_cluster(ClusterConfig(name="2x8xH100", nvlink_domain=domain), {})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("64xH100", "8x8xH100"),
        ("2x32xH100", "8x8xH100"),
        ("9xH100", "2x8xH100"),
        ("12xH200", "2x6xH200"),
        ("17xA100-40GB", "3x8xA100-40GB"),
        ("11xRTX-4090", "2x8xRTX-4090"),
        ("144xGB200", "36x4xGB200"),
        ("8xGH200", "2x4xGH200"),
    ],
)
def test_a_node_has_no_more_gpus_than_servers_hold(name: str, instead: str) -> None:
    with pytest.raises(UserError, match="into one node") as caught:
        resolve_cluster(ClusterConfig(name=name), {})
    assert f"write cluster.name={instead}," in caught.value.fix
    assert resolve_cluster(ClusterConfig(name=instead), {}).name == instead
    stated = parse_cluster(name).devices_per_node
    cluster = resolve_cluster(ClusterConfig(name=name, nvlink_domain=stated), {})
    assert cluster.nvlink_domain == stated


@pytest.mark.parametrize("name", ["72xGB200", "16xA100-40GB", "16xV100-32GB", "10xL40S", "64xCPU"])
def test_the_largest_nodes_that_exist_are_taken(name: str) -> None:
    assert resolve_cluster(ClusterConfig(name=name), {}).num_nodes == 1


def test_a_machine_has_as_many_gpus_as_it_shows(tmp_path: Path) -> None:
    cluster = resolve_cluster(ClusterConfig(), fake_nvidia_smi(tmp_path, [H200] * 12))
    assert cluster.devices_per_node == 12


@pytest.mark.parametrize("name", ["4x8xH100", "2xCPU", "8xV100-32GB"])
def test_json_round_trip(name: str) -> None:
    cluster = parse_cluster(name)
    assert ClusterSpec.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def fake_nvidia_smi(
    folder: Path, gpus: list[tuple[str, str, str]], code: int = 0
) -> dict[str, str]:
    """An environment whose nvidia-smi shows these (name, memory, compute capability)."""
    lines = {
        "name": "\n".join(f"{name}, {memory}" for name, memory, _ in gpus),
        "compute_cap": "\n".join(capability for *_, capability in gpus),
    }
    script = folder / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        f"--query-gpu=name,memory.total) echo '{lines['name']}';;\n"
        f"--query-gpu=compute_cap) echo '{lines['compute_cap']}';;\n"
        f"esac\nexit {code}\n"
    )
    script.chmod(0o755)
    return {"PATH": str(folder)}


H200 = ("NVIDIA H200", "143771", "9.0")


def test_known_gpus_are_probed(tmp_path: Path) -> None:
    cluster = probe_cluster(fake_nvidia_smi(tmp_path, [H200] * 4))
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.nvlink_domain) == (1, 4, 4)
    assert cluster.gpu is not None
    assert cluster.gpu.name == "H200"
    assert cluster.device_name == "NVIDIA H200"
    assert cluster.memory_bytes == cluster.gpu.memory_bytes == 143771 * MIB
    assert cluster.source == "probed"


@pytest.mark.parametrize(
    ("visible", "num_devices"),
    [
        ("0,1", 2),
        ("3", 1),
        ("GPU-aa,GPU-bb,GPU-cc", 3),
        ("0,9,1", 1),
        ("", 0),
        ("-1", 0),
        ("9" * 5000, 0),
    ],
)
def test_cuda_visible_devices_is_respected(tmp_path: Path, visible: str, num_devices: int) -> None:
    environ = fake_nvidia_smi(tmp_path, [H200] * 4) | {"CUDA_VISIBLE_DEVICES": visible}
    cluster = probe_cluster(environ)
    assert cluster.device == ("cuda" if num_devices else "cpu")
    assert cluster.devices_per_node == max(num_devices, 1)


@pytest.mark.parametrize(
    ("capability", "formats"),
    [
        ("12.0", {"fp32", "fp16", "bf16", "fp8"}),
        ("8.9", {"fp32", "fp16", "bf16", "fp8"}),
        ("8.6", {"fp32", "fp16", "bf16"}),
        ("7.5", {"fp32", "fp16"}),
        ("6.1", {"fp32"}),
        ("[N/A]", {"fp32"}),
    ],
)
def test_strangers_are_judged_by_capability(
    tmp_path: Path, capability: str, formats: set[str]
) -> None:
    environ = fake_nvidia_smi(tmp_path, [("NVIDIA Future 1", "1000", capability)] * 2)
    cluster = probe_cluster(environ)
    assert cluster.gpu is None
    assert cluster.memory_bytes == 1000 * MIB
    assert cluster.compute_formats == formats


def test_shared_memory_chips_report_no_memory(tmp_path: Path) -> None:
    cluster = probe_cluster(fake_nvidia_smi(tmp_path, [("NVIDIA GB10", "[N/A]", "12.1")]))
    assert cluster.memory_bytes == probe_cpu().memory_bytes


def test_mixed_gpus_are_refused(tmp_path: Path) -> None:
    environ = fake_nvidia_smi(tmp_path, [H200, ("Tesla T4", "15360", "7.5")])
    with pytest.raises(UserError, match="different kinds of GPUs") as caught:
        probe_cluster(environ)
    assert caught.value.code is ExitCode.ENVIRONMENT
    assert probe_cluster(environ | {"CUDA_VISIBLE_DEVICES": "1"}).device_name == "Tesla T4"


def test_a_driver_that_fails_means_cpu(tmp_path: Path) -> None:
    assert probe_cluster(fake_nvidia_smi(tmp_path, [], code=9)).device == "cpu"
    assert probe_cluster(NO_GPUS).world_size == 1


@pytest.mark.parametrize(
    ("cpuinfo", "formats", "name"),
    [
        ("model name\t: Xeon 8480\nflags\t\t: fpu avx512f avx512_bf16\n", {"fp32", "bf16"}, "Xeon"),
        ("model name\t: Xeon 6130\nflags\t\t: fpu avx512f\n", {"fp32"}, "Xeon"),
        ("Features\t: fp asimd fphp bf16 i8mm\n", {"fp32", "bf16"}, "CPU"),
        ("Features\t: fp asimd fphp asimdhp\n", {"fp32"}, "CPU"),
    ],
)
def test_cpu_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, formats: set[str], name: str
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(probe, "CPUINFO", tmp_path / "cpuinfo")
    assert probe_cpu().compute_formats == formats
    assert name in probe_cpu().device_name


def test_inside_torchrun_the_launcher_counts(tmp_path: Path) -> None:
    launched = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    gpus = resolve_cluster(ClusterConfig(), fake_nvidia_smi(tmp_path, [H200] * 8) | launched)
    assert (gpus.num_nodes, gpus.devices_per_node, gpus.nvlink_domain) == (2, 8, 8)
    cpus = resolve_cluster(ClusterConfig(), NO_GPUS | launched)
    assert (cpus.num_nodes, cpus.devices_per_node) == (2, 8)
    assert cpus.memory_bytes == probe_cpu().memory_bytes // 8
    named = resolve_cluster(ClusterConfig(name="4xH100"), launched)
    assert named.world_size == 4
    for bad in (
        {"WORLD_SIZE": "7"},
        {"WORLD_SIZE": "many"},
        {"WORLD_SIZE": "9" * 5000},
        {"LOCAL_WORLD_SIZE": "0"},
    ):
        with pytest.raises(UserError, match="WORLD_SIZE"):
            resolve_cluster(ClusterConfig(), NO_GPUS | launched | bad)
