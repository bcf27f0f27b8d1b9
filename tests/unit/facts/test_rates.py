from __future__ import annotations

import json

import pytest

from shardwise.facts.gpus import GPUS, GpuSpec, find_gpu
from shardwise.facts.rates import Rates, rates_of


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_reaches_less_than_its_datasheet_says(gpu: GpuSpec) -> None:
    rates = rates_of(gpu)
    assert rates.matmul_flops.keys() == gpu.peak_flops.keys()
    for fmt, rate in rates.matmul_flops.items():
        assert 0.2 * gpu.peak_flops[fmt] < rate < gpu.peak_flops[fmt]
    half = max(gpu.peak_flops.get("bf16", 0), gpu.peak_flops["fp16"])
    assert rates.attention_backward_flops < rates.attention_forward_flops < half
    assert 0.5 * gpu.memory_bandwidth < rates.memory_bytes_per_s < gpu.memory_bandwidth
    assert rates.source == "catalogue"


def test_what_was_measured_on_an_h200() -> None:
    # 704 TFLOP/s over the matmuls of an 8B step, whose blocks are 4096 wide.
    rates = rates_of(find_gpu("H200"))
    reached = rates.matmul_flops["bf16"] / (1 + rates.half_width / 4096)
    assert reached == pytest.approx(704e12, rel=0.03)
    # 34 ms forward and 102 ms backward of attention over 16,384 tokens in sequences of 4096.
    flops = 4 * 16384 * 4096 * 2048 * 32 * (1 + rates.half_context / 4096)
    assert flops / rates.attention_forward_flops == pytest.approx(0.034, rel=0.05)
    assert 2.5 * flops / rates.attention_backward_flops == pytest.approx(0.102, rel=0.05)


def test_generations_are_in_order() -> None:
    names = ("V100", "A100", "H100", "H200", "B200")
    rates = [rates_of(find_gpu(name)).matmul_flops["fp16"] for name in names]
    assert rates == sorted(rates)


def test_a_part_with_another_peak_keeps_its_familys_shares() -> None:
    pcie, sxm = find_gpu("H100-PCIe"), find_gpu("H100")
    share = rates_of(pcie).matmul_flops["bf16"] / pcie.peak_flops["bf16"]
    assert share == pytest.approx(rates_of(sxm).matmul_flops["bf16"] / sxm.peak_flops["bf16"])


def test_survives_json() -> None:
    rates = rates_of(find_gpu("L40S"))
    assert Rates.from_dict(json.loads(json.dumps(rates.to_dict()))) == rates
