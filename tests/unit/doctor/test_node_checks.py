"""Each check of a node fires on its fault, and all are quiet on a healthy server."""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from healthy import GPU, cards, gpus, healthy_plans, plan_of, server
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.doctor.check import find_faults
from shardwise.doctor.machine.gpu import read_gpus
from shardwise.doctor.machine.network import RdmaPort, is_port_taken, read_rdma_ports
from shardwise.doctor.machine.node import Node, read_node
from shardwise.doctor.machine.nodes import NODES
from shardwise.doctor.machine.pci import redirecting_bridges
from shardwise.doctor.registry import NODE_CHECKS
from shardwise.errors import UserError
from shardwise.plan.planned import Plan
from shardwise.units import GIB, MIB

SEVERAL = ("model=llama-3.1-8b", "cluster=2x8xH100")
XID = "[  91.2] NVRM: Xid (PCI:0000:3b:00): {}, pid=4711, name=python, GPU has fallen off the bus."
FELL = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus."


def node_of(settings: tuple[str, ...] = SEVERAL, **changes: object) -> Node:
    return server(plan_of(*settings), **changes)


def with_gpu(**changes: str) -> Callable[[], Node]:
    return lambda: node_of(gpus=gpus(**changes))


def with_environ(**variables: str) -> Callable[[], Node]:
    return lambda: node_of(environ=variables)


OFFLOAD = ("model=llama-3.1-70b", "cluster=8xH100", "memory.offload=cpu")
# As a machine that is not this one would tell it. The faults that this machine can have for real
# are further below.
FAULTS: dict[str, Callable[[], Node]] = {
    "SW202": lambda: node_of(locked_bytes=8 * MIB),
    "SW203": lambda: node_of(shm_bytes=64 * MIB),
    "SW204": lambda: node_of(OFFLOAD, memory_left=200 * GIB),
    "SW207": lambda: node_of(write_bytes_per_s=5e6),
    "SW208": lambda: node_of(cores=4),
    "SW209": lambda: node_of(address="127.0.1.1"),
    "SW220": lambda: node_of(xids=(FELL,)),
    "SW221": lambda: node_of(xids=(FELL.replace("79", "31"),)),
    "SW222": with_gpu(ecc__errors__uncorrected__volatile__total="2"),
    "SW223": with_gpu(remapped_rows__pending="Yes"),
    "SW224": with_gpu(clocks_throttle_reasons__hw_thermal_slowdown="Active"),
    "SW225": with_gpu(temperature__gpu="88"),
    "SW226": with_gpu(power__limit="500.00"),
    "SW227": with_gpu(clocks__applications__graphics="1200"),
    "SW228": with_gpu(pcie__link__gen__max="3"),
    "SW229": with_gpu(pcie__link__width__current="8"),
    "SW230": with_gpu(memory__used="40960"),
    "SW231": with_gpu(mig__mode__current="Enabled"),
    "SW232": lambda: node_of(gpus=gpus(7)),
    "SW233": with_gpu(clocks__max__sm="1755"),
    "SW240": with_environ(NCCL_SOCKET_IFNAME="enp3s0"),
    "SW241": with_environ(NCCL_IB_HCA="mlx4"),
    "SW242": lambda: replace(node_of(), rdma_ports=(), environ={}),
    "SW243": lambda: node_of(rdma=cards(state="DOWN")),
    "SW244": lambda: node_of(
        rdma=(*cards(), RdmaPort("mlx5_bond", "1", "ACTIVE", "25 Gb/sec (1X EDR)")), environ={}
    ),
    "SW245": with_environ(NCCL_P2P_DISABLE="1"),
    "SW246": lambda: node_of(modules=frozenset()),
    "SW247": lambda: node_of(bridges=("0000:16:01.0",)),
    "SW248": lambda: node_of(nccl="2.18.3"),
    "SW249": with_environ(CUDA_LAUNCH_BLOCKING="1"),
}


def found_in(node: Node) -> dict[str, str]:
    own = [check for check in NODE_CHECKS if check.id not in PREFLIGHT]
    return {finding.check.id: finding.evidence for finding in find_faults(own, node)}


# Those look at the machine itself, and stand below.
PREFLIGHT = ("SW206", "SW210", "SW211", "SW212", "SW213", "SW214")
REAL = {"SW201", "SW205", *PREFLIGHT}


def test_every_check_of_a_node_has_a_fault() -> None:
    assert {check.id for check in NODE_CHECKS} == set(FAULTS) | REAL


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    found = found_in(FAULTS[name]())
    assert name in found, found
    if name in ("SW222", "SW224", "SW226", "SW228"):
        assert found[name].startswith("GPU 3 (NVIDIA H100 80GB HBM3): ")


def test_healthy_servers_are_quiet() -> None:
    for plan in healthy_plans():
        on_gpus = plan.cluster.device == "cuda" and plan.cluster.devices_per_node <= 8
        node = server(plan) if on_gpus else server(plan, gpus=(), rdma=())
        assert found_in(node) == {}, (plan.model.name, plan.cluster.name)
    assert found_in(server(None)) == {}


def find(node: Node, name: str) -> list[str]:
    (check,) = [check for check in NODE_CHECKS if check.id == name]
    return list(check.look(node))


def test_a_low_limit_of_open_files_is_seen() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert find(read_node(None, {}), "SW201") == [] or soft < 4096
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert find(read_node(None, {}), "SW201") == ["ulimit -n is 512, below 4096"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_port_in_use_is_seen() -> None:
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        node = read_node(plan_of(*SEVERAL), {"MASTER_PORT": str(port)}, writes=False)
        assert find(node, "SW205") == [f"something listens on port {port} of {node.host} already"]
        assert is_port_taken(port)
        # A rank of the job has the port itself, and ranks of one node choose a free one.
        rank = {"MASTER_PORT": str(port), "RANK": "0"}
        assert read_node(plan_of(*SEVERAL), rank, writes=False).taken_port is None
        assert read_node(None, {"MASTER_PORT": str(port)}).taken_port is None


def in_folder(folder: Path, *settings: str) -> Plan:
    return plan_of("model=tiny-llama", "cluster=1xCPU", f"runs_dir={folder}", *settings)


def test_a_disk_without_room_is_seen(tmp_path: Path) -> None:
    large = ("model=llama-3.1-405b", "cluster=32x8xH200", "checkpoint.keep=5000")
    plan = plan_of(*large, f"runs_dir={tmp_path}", "checkpoint.every=10", "train.steps=100000")
    (told,) = find(server(plan), "SW206")
    assert "has no room for 5001 more checkpoints of" in told
    assert find(server(in_folder(tmp_path)), "SW206") == []


def test_a_directory_that_cannot_be_written_is_seen(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (told,) = find(server(in_folder(tmp_path / "file")), "SW206")
    assert "nothing can be written to the run directory" in told


def test_what_the_preflight_refuses_is_seen(tmp_path: Path) -> None:
    missing = in_folder(tmp_path, "data.source=text", f"data.path={tmp_path / 'none.txt'}")
    assert len(find(server(missing), "SW210")) == 1
    assert len(find(server(in_folder(tmp_path, "data.tokenizer=none/such")), "SW211")) <= 1
    attention = in_folder(tmp_path, "model.attention=flash_attention_2")
    (told,) = find(server(attention), "SW213")
    assert "flash_attention_2 does not train on a CPU" in told
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        (told,) = find(server(in_folder(tmp_path, f"observe.prometheus_port={port}")), "SW214")
        assert f"127.0.0.1:{port}" in told


def test_weights_that_are_cut_off_are_seen(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 10**6) + b"{")
    plan = replace(in_folder(tmp_path), weights_dir=str(tmp_path))
    assert len(find(server(plan), "SW212")) == 1


def fake_smi(folder: Path, rows: list[dict[str, str]], unknown: str = "") -> dict[str, str]:
    """An environment with an nvidia-smi that answers as the real one, and refuses a question with
    a field that it does not know."""
    answers = folder / "answers"
    answers.mkdir()
    script = ["#!/bin/sh", 'case "$1" in']
    from shardwise.doctor.machine import gpu

    for number, question in enumerate([",".join(gpu._QUESTIONS), *gpu._QUESTIONS]):
        lines = [", ".join(row[field] for field in question.split(",")) for row in rows]
        (answers / str(number)).write_text("\n".join(lines) + "\n")
        if unknown and unknown in question:
            said = f'Field "{unknown}" is not a valid field to query.'
            script.append(f"--query-gpu={question}) echo '{said}'; exit 2;;")
        else:
            script.append(f"--query-gpu={question}) /bin/cat {answers / str(number)};;")
    (folder / "nvidia-smi").write_text("\n".join([*script, "esac", ""]))
    (folder / "nvidia-smi").chmod(0o755)
    (folder / "dmesg").write_text(f"#!/bin/sh\necho '{XID.format(79)}'\n")
    (folder / "dmesg").chmod(0o755)
    return {"PATH": str(folder)}


def test_nvidia_smi_and_the_kernel_log_are_read(tmp_path: Path) -> None:
    rows = [{**GPU, "index": str(at)} for at in range(2)]
    rows[1]["ecc.errors.uncorrected.volatile.total"] = "3"
    rows[1]["clocks_throttle_reasons.sw_thermal_slowdown"] = "Active"
    whole, partial = tmp_path / "whole", tmp_path / "partial"
    whole.mkdir()
    partial.mkdir()
    assert read_gpus(fake_smi(whole, rows))[1].fields == rows[1]
    node = read_node(None, fake_smi(partial, rows, "retired_pages.pending"))
    assert [gpu.name for gpu in node.gpus] == [
        "GPU 0 (NVIDIA H100 80GB HBM3)", "GPU 1 (NVIDIA H100 80GB HBM3)",
    ]  # fmt: skip
    assert node.gpus[0].driver == "570.124.06"
    assert node.gpus[0].text("retired_pages.pending") is None
    assert node.xids == (FELL,)
    ids = {finding.check.id for finding in find_faults(NODE_CHECKS, node)}
    assert {"SW220", "SW222", "SW224"} <= ids
    assert read_gpus({"PATH": str(whole), "CUDA_VISIBLE_DEVICES": ""}) == ()
    assert read_gpus({"PATH": ""}) == ()


def put(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_acs_is_read_from_the_registers_of_bridges(tmp_path: Path) -> None:
    devices = tmp_path / "sys/bus/pci/devices"
    registers = bytearray(4096)
    # A capability (AER, 0x0001) that leads to ACS (0x000d) at 0x148, with its control at 0x14e.
    struct.pack_into("<I", registers, 0x100, 0x0001 | 2 << 16 | 0x148 << 20)
    struct.pack_into("<I", registers, 0x148, 0x000D | 1 << 16)
    put(devices / "0000:00:01.0/class", "0x060400\n")
    put(devices / "0000:00:01.0/config", bytes(registers))
    struct.pack_into("<H", registers, 0x14E, 0b11101)
    put(devices / "0000:16:01.0/class", "0x060400\n")
    put(devices / "0000:16:01.0/config", bytes(registers))
    put(devices / "0000:17:00.0/class", "0x030200\n")
    put(devices / "0000:17:00.0/config", bytes(registers))
    assert redirecting_bridges(tmp_path) == ("0000:16:01.0",)
    # Without privileges the kernel shows 64 bytes, and nothing is known.
    for device in devices.iterdir():
        put(device / "config", bytes(64))
    assert redirecting_bridges(tmp_path) is None
    # A list of capabilities in a circle ends.
    struct.pack_into("<I", registers, 0x148, 0x0001 | 0x100 << 20)
    put(devices / "0000:16:01.0/config", bytes(registers))
    assert redirecting_bridges(tmp_path) == ()


def test_rdma_ports_are_read(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    put(port / "state", "4: ACTIVE\n")
    put(port / "rate", "400 Gb/sec (4X NDR)\n")
    expected = RdmaPort("mlx5_0", "1", "ACTIVE", "400 Gb/sec (4X NDR)")
    assert read_rdma_ports(tmp_path) == (expected,)


def test_exact_and_excluded_names_of_interfaces() -> None:
    def told(text: str) -> list[str]:
        return find(node_of(environ={"NCCL_SOCKET_IFNAME": text}), "SW240")

    assert told("^lo,docker") == told("eth") == told("=eth0") == told("") == []
    assert len(told("=eth")) == 1
    down = node_of(interfaces={"eth0": "down"}, environ={"NCCL_SOCKET_IFNAME": "eth0"})
    assert find(down, "SW240") == ["NCCL_SOCKET_IFNAME=eth0: eth0 is down"]


ODD_NODES: dict[str, Callable[[], Node]] = {
    "SW260": lambda: node_of(gpus=gpus(driver_version="535.1.2")),
    "SW261": lambda: node_of(nccl="2.26.2"),
    "SW262": with_gpu(clocks__max__sm="1755"),
    "SW263": with_gpu(power__limit="500.00"),
    "SW264": lambda: node_of(gpus=gpus(4)),
    "SW265": lambda: node_of(rdma=cards(4)),
    "SW266": lambda: node_of(environ={"NCCL_ALGO": "Ring"}),
}


@pytest.mark.parametrize("name", [check.id for check in NODES])
def test_nodes_that_differ_are_named(name: str) -> None:
    usual = node_of().to_dict()
    odd = {**ODD_NODES[name]().to_dict(), "host": "gpu-b"}
    assert find_faults(NODES, [usual, {**usual, "host": "gpu-c"}]) == []
    (found,) = [f for f in find_faults(NODES, [usual, odd]) if f.check.id == name]
    assert "gpu-a" in found.evidence and "gpu-b" in found.evidence


def test_train_tells_of_a_node_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{**GPU, "clocks_throttle_reasons.hw_thermal_slowdown": "Active"}]
    for name in ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", fake_smi(tmp_path, rows)["PATH"])
    (tmp_path / "run.yaml").write_text(
        f"model: tiny-llama\ndata: synthetic\ncluster: 1xCPU\nruns_dir: {tmp_path / 'run.yaml'}\n"
    )
    monkeypatch.setenv("SHARDWISE_EXCLUDE", str(tmp_path / "exclude"))
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-a")
    # It ends at the preflight, which comes after.
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml")])
    assert isinstance(result.exception, UserError)
    told = result.output + capfd.readouterr().err
    assert "error SW224: A GPU is throttled: GPU 0 (NVIDIA H100 80GB HBM3)" in told
    assert "error SW220: A GPU has reported a hardware error (XID)" in told
    assert "the next start leaves gpu-a out" in told
    assert (tmp_path / "exclude").read_text() == "gpu-a\n"
