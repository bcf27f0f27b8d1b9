"""Forecasts for ranks on CPUs, where compute and collectives take turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from calibrations import make_calibration
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.collective_cost import Link
from shardwise.facts.rates import Rates
from shardwise.plan.planned import Forecast, Plan

CLUSTER = "2x2xCPU"
LOOPBACK = Link(name="measured", bytes_per_s=7e8, hop_s=1e-3)
RATES = Rates(
    matmul_flops={"fp32": 1.8e10},
    half_width=16.0,
    attention_forward_flops=5.8e9,
    attention_backward_flops=6.5e9,
    memory_bytes_per_s=4e9,
    launch_s=1.4e-5,
    source="measured",
)
RUN = ("model=small-llama", "data=synthetic", "data.seq_len=64", "train.micro_batch=1")


@pytest.fixture(autouse=True)
def _calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    cluster = parse_cluster(CLUSTER)
    make_calibration(cluster, RATES, inside=LOOPBACK, between=LOOPBACK).save()


@pytest.fixture
def planned(plan_of: Callable[..., Plan]) -> Callable[..., Plan]:
    def plan(strategy: str, gigabytes: float | str = "auto") -> Plan:
        link = f"cluster.interconnect={gigabytes}"
        words = (f"cluster.name={CLUSTER}", f"shard.strategy={strategy}", "precision.param=fp32")
        return plan_of(*RUN, *words, link)

    return plan


@pytest.fixture
def forecast(planned: Callable[..., Plan]) -> Callable[..., Forecast]:
    def foresee(strategy: str, gigabytes: float | str = "auto") -> Forecast:
        found = planned(strategy, gigabytes).forecast
        assert found is not None
        return found

    return foresee


def test_nothing_hides_so_a_link_twice_as_slow_costs_its_whole_time(
    planned: Callable[..., Plan],
) -> None:
    fast, slow = planned("full_shard", 0.1), planned("full_shard", 0.05)
    assert fast.forecast is not None
    assert slow.forecast is not None
    whole, tail = 4 * fast.model.total_params, 4 * fast.model.tail_params
    # Two gathers, of which the tail needs one, and a reduce-scatter that gloo makes an all-reduce.
    moved = 0.75 * (2 * whole - tail) + 1.5 * whole
    extra = slow.forecast.step_s - fast.forecast.step_s
    assert extra == pytest.approx(moved / 0.956 * (1 / 0.05e9 - 1 / 0.1e9), rel=1e-3)


@pytest.mark.parametrize("gigabytes", [0.0125, 0.05, 0.2])
def test_hsdp_is_faster_than_one_dimension_across_a_link(
    forecast: Callable[..., Forecast], gigabytes: float
) -> None:
    assert forecast("hybrid_shard", gigabytes).step_s < forecast("full_shard", gigabytes).step_s


def test_the_slower_the_link_the_more_hsdp_gains(forecast: Callable[..., Forecast]) -> None:
    gains = [
        forecast("full_shard", rate).step_s / forecast("hybrid_shard", rate).step_s
        for rate in (0.2, 0.05, 0.0125)
    ]
    assert gains == sorted(gains)
    assert gains[-1] > 2


def test_measured_rates_are_named(forecast: Callable[..., Forecast]) -> None:
    assert forecast("full_shard").source == "measured"
