"""The memory and time of a frozen model with adapters, beside those of the same model trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.config.schema import ClusterConfig
from shardwise.facts.adapter_sizes import AdapterSpec
from shardwise.facts.calibration import rates_for
from shardwise.facts.cluster import resolve_cluster
from shardwise.facts.counted import preset_spec
from shardwise.facts.flops import flops_per_token
from shardwise.facts.models import ModelSpec
from shardwise.facts.rates import Rates
from shardwise.plan.decisions import FLOAT8_BASE, Decisions
from shardwise.plan.memory import estimate_memory
from shardwise.plan.reserved import reduce_buffer_bytes
from shardwise.plan.software import software_of
from shardwise.plan.time import estimate_time
from shardwise.plan.unit_sizes import unpacked_bytes

LLAMA = preset_spec("llama-3.1-8b")
ADAPTER = AdapterSpec(
    rank=16, num_layers=224, num_params=41_943_040, largest_unit=1_310_720, channels=2_621_440
)
LORA = replace(LLAMA, adapter=ADAPTER)
EIGHT = resolve_cluster(ClusterConfig(name="8xH100"), {})
DECIDED = Decisions(
    strategy="full_shard",
    shard=8,
    param_dtype="bf16",
    compile=True,
    kernels="own",
    micro_batch=2,
    seq_len=4096,
    adapter="lora",
)


def test_states_are_those_of_parameter_classes() -> None:
    memory = estimate_memory(LORA, EIGHT, DECIDED)
    frozen, trained = -(-LLAMA.total_params // 8), ADAPTER.num_params // 8
    assert memory.frozen == 2 * frozen
    assert memory.params == 2 * frozen + 4 * trained
    assert memory.optimizer == 8 * trained
    assert memory.states == 2 * frozen + 16 * trained


def test_modules_that_are_trained_whole_are_not_frozen_too() -> None:
    table = LLAMA.vocab_size * LLAMA.hidden_size
    sizes = {"whole": ("lm_head",), "whole_params": table, "head": table}
    spec = replace(ADAPTER, num_params=ADAPTER.num_params + table, **sizes)
    model = replace(LLAMA, adapter=spec)
    memory = estimate_memory(model, EIGHT, DECIDED)
    frozen, trained = -(-(LLAMA.total_params - table) // 8), spec.num_params // 8
    assert memory.states == 2 * frozen + 16 * trained
    # The head has a gradient in fp32.
    assert memory.loss >= estimate_memory(LORA, EIGHT, DECIDED).loss + 4 * table // 2
    more = flops_per_token(model, 4096) - flops_per_token(LORA, 4096)
    assert more == pytest.approx(2 * table)


def test_nothing_is_reduced_for_frozen_weights() -> None:
    whole, lora = (estimate_memory(each, EIGHT, DECIDED) for each in (LLAMA, LORA))
    assert reduce_buffer_bytes(LLAMA, DECIDED, EIGHT) > 2**30
    assert reduce_buffer_bytes(LORA, DECIDED, EIGHT) == 0
    # The head has no gradient in fp32 beside a slice of logits.
    assert whole.loss - lora.loss >= 4 * LLAMA.vocab_size * LLAMA.hidden_size


@pytest.mark.parametrize("keeps", [True, False])
def test_a_whole_frozen_model_is_used_where_it_is(keeps: bool) -> None:
    alone = replace(DECIDED, strategy="no_shard", shard=1, reshard_after_forward=not keeps)
    memory = estimate_memory(LORA, EIGHT, alone)
    assert memory.gathered + memory.buffers <= 4 * 2 * ADAPTER.num_params
    offloaded = estimate_memory(LORA, EIGHT, replace(alone, offload=True))
    assert offloaded.params == offloaded.frozen == 0
    assert offloaded.gathered + offloaded.buffers > LLAMA.vocab_size * LLAMA.hidden_size * 2


@pytest.mark.parametrize("packing", ["nf4", "mxfp4"])
def test_packed_weights_are_stored_and_gathered_as_bytes(packing: str) -> None:
    packed = 32 * 218_103_808  # the linear layers of the blocks
    num_bytes = packed * 52 // 100
    small = replace(
        ADAPTER,
        packing=packing,
        packed_params=packed,
        packed_bytes=num_bytes,
        largest_packed=4096 * 14336,
    )
    qlora = replace(LLAMA, adapter=small)
    floats, four_bits = (estimate_memory(each, EIGHT, DECIDED) for each in (LORA, qlora))
    rest = 2 * (LLAMA.total_params - packed)
    assert four_bits.frozen == pytest.approx((rest + num_bytes) / 8, rel=1e-6)
    # Two blocks are gathered, and the floats of one layer exist beside them.
    kept = replace(DECIDED, reshard_after_forward=False)
    assert estimate_memory(qlora, EIGHT, kept).gathered < 0.45 * (
        estimate_memory(LORA, EIGHT, kept).gathered
    )
    assert four_bits.buffers < floats.buffers + 2 * 4096 * 14336
    step, plain = (
        estimate_time(each, EIGHT.fabric, DECIDED, rates(), software_of("cuda", each, DECIDED))
        for each in (qlora, LORA)
    )
    # Each weight is made a float twice: at least 2.5 bytes of memory traffic each time.
    least = 2 * 2.5 * packed / rates().memory_bytes_per_s
    assert least < step.elementwise - plain.elementwise < 1.3 * least
    assert ModelSpec.from_dict(qlora.to_dict()) == qlora


def test_a_float8_base_is_stored_and_multiplied_in_eight_bits() -> None:
    packed = 32 * 218_103_808
    eight = replace(
        ADAPTER,
        packing="float8",
        packed_params=packed,
        packed_bytes=packed * 1004 // 1000,
        largest_packed=4096 * 14336,
    )
    model, decided = replace(LLAMA, adapter=eight), replace(DECIDED, linear=FLOAT8_BASE)
    memory = estimate_memory(model, EIGHT, decided)
    rest = 2 * (LLAMA.total_params - packed)
    assert memory.frozen == pytest.approx((rest + eight.packed_bytes) / 8, rel=1e-6)
    # The bytes of one layer are transposed; floats of it would be twice as many.
    assert unpacked_bytes(model, decided) == 4096 * 14336
    assert unpacked_bytes(model, DECIDED) == 2 * 4096 * 14336
    step, as_floats, plain = (
        estimate_time(each, EIGHT.fabric, how, rates(), software_of("cuda", each, how))
        for each, how in ((model, decided), (model, DECIDED), (LORA, DECIDED))
    )
    assert as_floats.matmul == plain.matmul
    # Published fp8 blocks are made floats as well.
    published = replace(LLAMA, adapter=replace(eight, packing="fp8"))
    assert software_of("cuda", published, DECIDED) == software_of("cuda", model, DECIDED)
    # The head and the adapters multiply in bf16.
    assert 0.5 * plain.matmul < step.matmul < 0.65 * plain.matmul
    assert plain.elementwise < min(step.elementwise, as_floats.elementwise)
    assert step.matmul + step.elementwise < 0.8 * (plain.matmul + plain.elementwise)


def rates() -> Rates:
    found = rates_for(EIGHT)
    assert found is not None
    return found


def seconds(model: ModelSpec) -> tuple[float, float, float]:
    software = software_of("cuda", model, DECIDED)
    step = estimate_time(model, EIGHT.fabric, DECIDED, rates(), software)
    return step.matmul, step.optimizer, step.exposed


def test_frozen_weights_take_two_thirds_of_the_matmuls() -> None:
    whole, lora = seconds(LLAMA), seconds(LORA)
    assert lora[0] == pytest.approx(whole[0] * 2 / 3)
    assert lora[1] == 0 < whole[1]
    assert lora[2] < whole[2]


def test_mfu_counts_what_is_computed() -> None:
    attention = flops_per_token(LLAMA, 4096) - 6 * LLAMA.matmul_params_per_token
    expected = 4 * LLAMA.matmul_params_per_token + 6 * ADAPTER.num_params + attention
    assert flops_per_token(LORA, 4096) == pytest.approx(expected)
    assert ModelSpec.from_dict(LORA.to_dict()) == LORA
