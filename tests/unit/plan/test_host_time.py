"""The host's part of a step, beside steps on an H200 that waited for it and steps that did not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.config.schema import ClusterConfig
from shardwise.facts.adapter_sizes import AdapterSpec
from shardwise.facts.block_kind import BlockKind
from shardwise.facts.block_work import Attention, Matmul, Moved, Work
from shardwise.facts.calibration import rates_for
from shardwise.facts.cluster import resolve_cluster
from shardwise.facts.counted import preset_spec
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import FLOAT8_BASE, Decisions
from shardwise.plan.host_time import host_seconds
from shardwise.plan.software import software_of
from shardwise.plan.time import estimate_time

LLAMA = preset_spec("llama-3.1-8b")
H200 = resolve_cluster(ClusterConfig(name="1xH200"), {})
RATES = rates_for(H200)
# Of Llama 3.1 8B's block with adapters of rank 16, as benchmarks/adapters.py counts it.
_KERNELS = {"compiled own": 83, "compiled own selective": 101, "compiled own full": 114}


def adapted(packing: str) -> ModelSpec:
    """Llama 3.1 8B with adapters in all linear layers and a packed base."""
    sides = [(4096, 4096)] * 2 + [(4096, 1024)] * 2 + [(4096, 14336)] * 2 + [(14336, 4096)]
    base = [Matmul(rows=1, inner=inner, width=width) for inner, width in sides]
    down = [Matmul(rows=1, inner=inner, width=16) for inner, _ in sides]
    up = [Matmul(rows=1, inner=16, width=width) for _, width in sides]
    work = Work(
        matmuls=(*base, *down, *up),
        attentions=(Attention(heads=32, kv_heads=8, key_width=128, value_width=128),),
        passes={way: Moved(4e5, 6e5, kernels) for way, kernels in _KERNELS.items()},
    )
    packed = LLAMA.num_layers * sum(inner * width for inner, width in sides)
    adapter = AdapterSpec(
        rank=16,
        num_layers=224,
        num_params=41_943_040,
        largest_unit=1_310_720,
        channels=2_621_440,
        packed_params=packed,
        packing=packing,
        packed_bytes=packed if packing == "float8" else packed // 2,
        largest_packed=4096 * 14336,
    )
    kind = BlockKind(count=LLAMA.num_layers, saved={}, work=work)
    return replace(LLAMA, adapter=adapter, kinds=(kind,))


def decisions(
    micro_batch: int, seq_len: int, recompute: str | float = "none", linear: str = "param"
) -> Decisions:
    return Decisions(
        param_dtype="bf16",
        compile=True,
        kernels="own",
        micro_batch=micro_batch,
        seq_len=seq_len,
        checkpoint_activations=recompute,
        adapter="lora",
        linear=linear,
    )


def host_ms(model: ModelSpec, decided: Decisions) -> float:
    return 1e3 * host_seconds(model, decided, RATES, software_of("cuda", model, decided))


def waits(model: ModelSpec, decided: Decisions) -> float:
    """The share of a step that the GPU waits for the host."""
    software = software_of("cuda", model, decided)
    step = estimate_time(model, H200.fabric, decided, RATES, software)
    return step.launch / step.total


def test_steps_that_waited_for_the_host_are_known() -> None:
    # 330 and 520 ms were measured, 12 ms of them at the two ends of a step.
    recomputed = decisions(1, 2048, "full")
    assert 32 * host_ms(adapted("nf4"), recomputed) == pytest.approx(318, rel=0.03)
    multiplied = decisions(2, 4096, linear=FLOAT8_BASE)
    assert 32 * host_ms(adapted("float8"), multiplied) == pytest.approx(508, rel=0.03)
    assert waits(adapted("nf4"), recomputed) > 0.3
    assert waits(adapted("float8"), multiplied) > 0.2


def test_long_kernels_hide_the_host() -> None:
    assert waits(adapted("nf4"), decisions(4, 4096)) == 0.0
    assert waits(adapted("float8"), decisions(4, 4096, linear=FLOAT8_BASE)) == 0.0


def test_what_is_recomputed_is_launched_again() -> None:
    none, half, full = (
        host_ms(adapted("nf4"), decisions(1, 4096, mode)) for mode in ("none", 0.5, "full")
    )
    assert none < full and half == pytest.approx((none + full) / 2)
    plain = replace(decisions(1, 4096), adapter="none")
    assert host_ms(LLAMA, plain) < host_ms(
        LLAMA, replace(plain, checkpoint_activations="selective")
    )


def test_a_host_with_slower_launches_takes_longer() -> None:
    decided = replace(decisions(1, 4096), adapter="none")
    software = software_of("cuda", LLAMA, decided)
    slower = replace(RATES, launch_s=2 * RATES.launch_s)
    assert host_seconds(LLAMA, decided, slower, software) == pytest.approx(
        2 * host_seconds(LLAMA, decided, RATES, software)
    )


def test_weights_that_are_gathered_cost_the_host_too() -> None:
    alone = decisions(1, 4096)
    assert host_ms(adapted("nf4"), replace(alone, shard=8)) > host_ms(adapted("nf4"), alone)
