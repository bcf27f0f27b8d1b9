from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from calibrations import make_calibration
from shardwise.errors import UserError
from shardwise.facts.calibration import (
    Calibration,
    calibration_folder,
    load_calibration,
    rates_for,
    with_measured_links,
)
from shardwise.facts.cluster import ClusterSpec, parse_cluster
from shardwise.facts.collective_cost import Link, ring_load
from shardwise.facts.rates import Rates, rates_of

LINK = Link(name="measured inside a domain", bytes_per_s=3e11, hop_s=4e-6)
RATES = Rates(
    matmul_flops={"bf16": 6.5e14},
    half_width=200.0,
    attention_forward_flops=5e14,
    attention_backward_flops=4e14,
    memory_bytes_per_s=4e12,
    launch_s=5e-6,
    source="measured",
)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))


def calibration_of(cluster: ClusterSpec, inside: Link | None = LINK) -> Calibration:
    curves = {"matmul": [{"format": "bf16", "width": 4096, "flops": 6.4e14}]}
    return make_calibration(cluster, RATES, inside=inside, curves=curves)


def test_a_saved_calibration_comes_back() -> None:
    found = calibration_of(parse_cluster("8xH100"))
    path = found.save()
    assert path.name == "h100-8.json"
    assert load_calibration(path) == found


def test_the_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert calibration_folder() == tmp_path / "calibration"
    monkeypatch.delenv("SHARDWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert calibration_folder() == Path("/somewhere/shardwise/calibration")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert calibration_folder() == Path("/home/me/.cache/shardwise/calibration")


def test_measured_rates_stand_above_the_catalogue() -> None:
    cluster = parse_cluster("8xH100")
    assert cluster.gpu is not None
    catalogue = rates_of(cluster.gpu)
    assert rates_for(cluster) == catalogue
    calibration_of(cluster).save()
    found = rates_for(cluster)
    assert found is not None
    assert (found.source, found.matmul_flops["bf16"]) == ("measured", 6.5e14)
    # What was not measured is still known.
    assert found.matmul_flops["fp16"] == catalogue.matmul_flops["fp16"]


def test_one_gpu_speaks_for_all_of_its_kind_but_not_for_their_links() -> None:
    calibration_of(parse_cluster("1xH100"), inside=None).save()
    cluster = parse_cluster("4x8xH100")
    found = rates_for(cluster)
    assert found is not None
    assert found.source == "measured"
    assert with_measured_links(cluster).fabric.source == "catalogue"
    others = rates_for(parse_cluster("8xH200")), rates_for(parse_cluster("8xH100-PCIe"))
    assert all(each is not None and each.source == "catalogue" for each in others)


def test_links_of_a_whole_node_serve_several_nodes() -> None:
    calibration_of(parse_cluster("8xH100")).save()
    cluster = with_measured_links(parse_cluster("4x8xH100"))
    assert (cluster.fabric.inside, cluster.fabric.source) == (LINK, "measured")
    assert with_measured_links(parse_cluster("4xH100")).fabric.source == "catalogue"


def test_the_calibration_in_the_same_layout_comes_first() -> None:
    eight, one = calibration_of(parse_cluster("8xH100")), calibration_of(parse_cluster("1xH100"))
    newer = replace(one, created="2026-11-16 06:00:00", rates=replace(RATES, launch_s=1e-6))
    eight.save()
    newer.save()
    for name, launch_s in (("8xH100", 5e-6), ("1xH100", 1e-6), ("2xH100", 1e-6)):
        found = rates_for(parse_cluster(name))
        assert found is not None
        assert found.launch_s == launch_s


def test_ranks_on_a_cpu_share_it_so_their_number_matters() -> None:
    assert rates_for(parse_cluster("2xCPU")) is None
    calibration_of(parse_cluster("2xCPU")).save()
    assert rates_for(parse_cluster("2xCPU")) == RATES
    assert rates_for(parse_cluster("4xCPU")) is None
    assert calibration_of(parse_cluster("2x2xCPU")).path().name.endswith("-2x2.json")


def test_a_given_network_stands_above_a_measured_one() -> None:
    cluster = replace(
        parse_cluster("2x2xCPU"), measured_inside=LINK, measured_between=LINK, interconnect=0.0125
    )
    between = cluster.fabric.between
    assert between.bytes_per_s == pytest.approx(0.0125e9 * 1448 / 1514, rel=1e-3)
    # gloo's own time for a hop is larger than a wire's.
    slow = replace(cluster, measured_between=replace(LINK, hop_s=1e-3))
    assert slow.fabric.between.hop_s == 1e-3


def test_measured_links_survive_the_plan(tmp_path: Path) -> None:
    cluster = replace(parse_cluster("2x2xCPU"), measured_inside=LINK)
    data = json.loads(json.dumps(cluster.to_dict()))
    assert ClusterSpec.from_dict(data) == cluster
    # Plans of before did not know of them.
    old = {key: value for key, value in data.items() if not key.startswith("measured_")}
    assert ClusterSpec.from_dict(old) == parse_cluster("2x2xCPU")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace('"rates"', '"rate"'),
        lambda text: text.replace('"half_width"', '"width"'),
        lambda text: text.replace("6.5e14", "0.0").replace("650000000000000.0", "0.0"),
        lambda text: text.replace("650000000000000.0", '"fast"'),
        lambda text: text.replace("300000000000.0", "-1.0"),
    ],
)
def test_a_damaged_file_is_named_with_the_way_out(damage: object) -> None:
    cluster = parse_cluster("8xH100")
    path = calibration_of(cluster).save()
    whole = path.read_text()
    path.write_text(damage(whole))  # type: ignore[operator]
    assert path.read_text() != whole
    with pytest.raises(UserError, match=r"h100-8\.json is not a calibration") as caught:
        rates_for(cluster)
    assert "--calibrate" in caught.value.fix
    calibration_of(cluster).save()
    assert rates_for(cluster) is not None


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot save the measurements") as caught:
        calibration_of(parse_cluster("8xH100")).save()
    assert "SHARDWISE_CACHE" in caught.value.fix


def test_gloo_reduces_everything_to_scatter_a_part() -> None:
    whole = 1e6
    gloo, nccl = (ring_load(name, "reduce_scatter", whole, 4) for name in ("gloo", "nccl"))
    assert nccl == (3, 0.75 * whole)
    assert gloo == (6, 1.5 * whole) == ring_load("gloo", "all_reduce", whole, 4)
    assert ring_load("gloo", "all_gather", whole, 4) == ring_load("nccl", "all_gather", whole, 4)
