"""The same commands on machines with another CPU: no message or plan may know the one it is on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from other_machines import MACHINES, Machine, pretences

from shardwise.cli.main import main
from shardwise.config.schema import ClusterConfig
from shardwise.facts import probe
from shardwise.facts.calibration import device_key
from shardwise.facts.cluster import ClusterSpec, resolve_cluster
from shardwise.units import GIB


@pytest.fixture(params=MACHINES, ids=lambda machine: machine.id)
def machine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    """This process takes itself to be on another machine, in an empty directory."""
    other: Machine = request.param
    for place, name, function in pretences(other):
        monkeypatch.setattr(place, name, function)
    monkeypatch.setattr(probe, "memory_limit", lambda: None)  # of a container that tests run in
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("run.yaml").write_text("model: tiny-llama\ncluster: local\n")
    return other


def shardwise(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwise", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_the_cpu_is_probed(machine: Machine) -> None:
    cpu = probe.probe_cpu()
    assert cpu.device_name.strip() == cpu.device_name != ""
    assert "stepping" not in cpu.device_name
    assert cpu.memory_bytes == machine.gibibytes * GIB
    assert cpu.compute_formats == {"fp32"} | ({"bf16"} if machine.has_bf16 else set())


@pytest.mark.parametrize(("name", "ranks"), [("local", 1), ("2xCPU", 2), ("2x2xCPU", 4)])
def test_clusters_of_cpu_ranks(machine: Machine, name: str, ranks: int) -> None:
    cluster = resolve_cluster(ClusterConfig(name=name), {})
    assert cluster.world_size == ranks
    assert cluster.memory_bytes == machine.gibibytes * GIB // ranks
    assert cluster.device_in_words == f"this CPU ({cluster.device_name})"
    assert ClusterSpec.from_dict(cluster.to_dict()) == cluster
    assert device_key(cluster).endswith(f"{machine.cores}-cores")


@pytest.mark.parametrize("name", ["local", "2xCPU"])
def test_a_small_model_is_planned(
    machine: Machine,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shardwise(monkeypatch, "plan", "run.yaml", "--cluster", name) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"on {name}:" in said
    assert f"no rates are known for this CPU ({probe.probe_cpu().device_name})" in said
    # Whether the CPU computes bf16 or not: losses would depend on the machine.
    assert re.search(r"param_dtype +fp32 ", said)


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_float8_is_refused_in_the_same_words(
    machine: Machine,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shardwise(monkeypatch, verb, "run.yaml", "precision.linear=float8") == 2
    said = capsys.readouterr().err
    assert "precision.linear=float8, but this CPU (" in said
    assert f"({probe.probe_cpu().device_name}) does not compute float8" in said
    assert "write precision.linear=param" in said


def test_gpus_that_are_not_there_are_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shardwise(monkeypatch, "train", "run.yaml", "cluster.name=8xH100") == 4
    assert "this machine has none that nvidia-smi shows" in capsys.readouterr().err
