from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.config.schema import (
    ClusterConfig,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
)
from shardwise.facts.cluster import resolve_cluster
from shardwise.facts.flops import Efficiency
from shardwise.launch.prepare import choose_plan
from shardwise.metrics.meters import PeakMemory, efficiency, peak_memory
from shardwise.metrics.progress_line import ExpertLoad, StepReport, format_line
from shardwise.plan.planned import Plan
from shardwise.units import GIB

REPORT: dict[str, Any] = {
    "step": 40,
    "num_steps": 2000,
    "loss": 2.43104,
    "grad_norm": 0.8349,
    "lr": 2e-5,
    "step_s": 3.43,
    "tokens": 40 * 2**21,
    "tokens_per_s": 41200.0,
    "tokens_per_s_planned": 42900.0,
    "efficiency": Efficiency(0.461, 0.461),
    "mfu_planned": 0.48,
    "memory": PeakMemory(int(58.0 * GIB), int(61.3 * GIB)),
    "memory_capacity": 80 * GIB,
    "memory_planned": int(60.1 * GIB),
    "data_share": 0.012,
    "eta_s": 6720.0,
}


def line(**changes: Any) -> str:
    return format_line(StepReport(**{**REPORT, **changes}))


def test_the_line() -> None:
    assert line().splitlines() == [
        "step   40/2000  loss 2.4310  gnorm 0.83  lr 2.0e-05  eta 1h52m  41.2k tok/s/gpu",
        "  mfu 46.1% (plan 48.0)  mem 61.3/80 GiB (plan 60.1)  data 1%",
    ]


def test_the_line_fits_80_columns_whatever_it_says() -> None:
    load = ExpertLoad(most=10.517, least=0.2, entropy=0.98, dropped=0)
    text = line(step=123456, num_steps=1000000, aux_loss=1.0, z_loss=2.0, experts=load,
                trained_share=0.4, loss=12.3456, eta_s=9e5)  # fmt: skip
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("step  123456/1000000  loss 12.3456")


def test_a_run_on_cpus_has_ranks_and_no_gpus() -> None:
    text = format_line(StepReport(**{**REPORT, "efficiency": None}), "cpu")
    assert "tok/s/rank" in text and "gpu" not in text


def test_the_load_balancing_loss_stands_beside_the_loss() -> None:
    assert "loss 2.4310  aux 1.0234  gnorm 0.83" in line(aux_loss=1.02341)


def test_a_mixture_shows_its_busiest_expert() -> None:
    load = ExpertLoad(most=1.517, least=0.2, entropy=0.98, dropped=0)
    assert "loss 2.4310  experts 1.52x  gnorm 0.83" in line(experts=load)


def test_recompute_shows_hfu_beside_mfu() -> None:
    assert "mfu 40.0% (plan 48.0) hfu 52.5%" in line(efficiency=Efficiency(0.4, 0.525))


def test_an_unknown_peak_has_no_mfu() -> None:
    text = line(efficiency=None)
    assert "41.2k tok/s/gpu (plan 42.9k)  mem" in " ".join(text.split("\n"))
    assert "mfu" not in text


def test_a_run_without_a_forecast_has_no_planned_speed() -> None:
    text = line(efficiency=None, mfu_planned=None, tokens_per_s_planned=None)
    assert "41.2k tok/s/gpu" in text and "plan 42.9k" not in text


def test_the_last_line_keeps_its_form() -> None:
    last = line(step=2000, eta_s=0.0)
    assert last.startswith("step 2000/2000  loss 2.4310")
    assert "  eta 0s  " in last


def plan_of(model: str, cluster: str, **sections: Any) -> Plan:
    config = RunConfig(
        model=ModelConfig(name=model),
        cluster=ClusterConfig(name=cluster),
        data=DataConfig(seq_len=4096),
        **sections,
    )
    return choose_plan(config, {"CUDA_VISIBLE_DEVICES": ""})


def test_mfu_of_llama_8b_by_hand() -> None:
    plan = plan_of("llama-3.1-8b", "8xH100", memory=MemoryConfig(checkpoint_activations="none"))
    # A block: q and o 4096 x 4096, k and v 4096 x 1024, three MLP matrices 4096 x 14336.
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    matmul = 32 * block + 128256 * 4096
    assert matmul == 7_504_658_432
    flops = 6 * matmul + 6 * 32 * 4096 * 4096
    expected = flops * 10_000 / 989.4e12
    found = efficiency(plan, 10_000)
    assert found is not None
    assert found.mfu == pytest.approx(expected, rel=1e-12)
    assert found.mfu == pytest.approx(0.48766, abs=1e-5)
    assert found.hfu == found.mfu


def test_hfu_counts_the_second_forward() -> None:
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    again = 2 * 32 * block + 2 * 32 * 4096 * 4096
    gained = []
    for mode in ("full", 0.5, "selective"):
        memory = MemoryConfig(checkpoint_activations=mode)  # type: ignore[arg-type]
        found = efficiency(plan_of("llama-3.1-8b", "8xH100", memory=memory), 10_000)
        assert found is not None
        gained.append(found.hfu - found.mfu)
    assert gained[0] == pytest.approx(again * 10_000 / 989.4e12, rel=1e-9)
    assert gained == pytest.approx([gained[0], gained[0] / 2, 0.0])


def test_the_peak_is_that_of_the_format() -> None:
    bf16 = efficiency(plan_of("llama-3.2-1b", "8xH100"), 1000)
    fp32 = efficiency(
        plan_of("llama-3.2-1b", "8xH100", precision=PrecisionConfig(param="fp32")), 1000
    )
    assert bf16 is not None and fp32 is not None
    assert fp32.mfu / bf16.mfu == pytest.approx(989.4 / 67.0)


def test_a_cpu_has_no_mfu() -> None:
    assert efficiency(plan_of("tiny-llama", "2xCPU"), 1000) is None


def test_a_peak_that_the_user_tells_counts() -> None:
    plan = plan_of("llama-3.2-1b", "8xH100")
    vendors = efficiency(plan, 1000)
    told = efficiency(replace(plan, cluster=replace(plan.cluster, peak_tflops=494.7)), 1000)
    assert vendors is not None and told is not None
    assert told.mfu == pytest.approx(2 * vendors.mfu)
    config = ClusterConfig(name="2xCPU", peak_tflops=1e-3)
    assert resolve_cluster(config, {}).peak_flops("fp32") == pytest.approx(1e9)


def test_peak_memory_of_a_process_is_its_resident_set() -> None:
    found = peak_memory(torch.device("cpu"))
    assert 50 * 2**20 < found.allocated == found.reserved < 2**40
