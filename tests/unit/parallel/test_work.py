"""What blocks compute, counted from their code, against figures by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwise.facts.block_kind import BlockKind
from shardwise.facts.block_work import Attention, Matmul, Work
from shardwise.facts.presets import PRESETS
from shardwise.plan import block_time
from shardwise.plan.host_time import LLAMA_KERNELS

HIDDEN, FFN, HEADS, KV_HEADS, WIDTH = 128, 320, 8, 2, 24
SHAPE: dict[str, Any] = {
    **{"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2},
    **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH},
}
QUERY, KEY = HEADS * WIDTH, KV_HEADS * WIDTH


Kinds = Callable[..., list[tuple[BlockKind, Work]]]


@pytest.fixture
def kinds_of(count: Callable[..., tuple[BlockKind, ...]]) -> Kinds:
    return lambda *args: [(kind, kind.work) for kind in count(*args)]


def matmul(inner: int, width: int, **others: Any) -> Matmul:
    return Matmul(rows=others.pop("rows", 1.0), inner=inner, width=width, **others)


def test_a_llama_block_by_hand(kinds_of: Kinds) -> None:
    ((_, work),) = kinds_of({**PRESETS["tiny-llama"], **SHAPE}, (False, True, "selective"))
    assert set(work.matmuls) == {
        matmul(HIDDEN, QUERY),
        matmul(HIDDEN, KEY, count=2),
        matmul(QUERY, HIDDEN),
        matmul(HIDDEN, FFN, count=2),
        matmul(FFN, HIDDEN),
    }
    (attention,) = work.attentions
    assert attention == Attention(
        heads=HEADS, kv_heads=KV_HEADS, key_width=WIDTH, value_width=WIDTH
    )
    # Nothing in the block needs what the last layer makes.
    assert work.last_flops == 2 * FFN * HIDDEN
    # Forward, in numbers of 16 bits: a norm reads and writes once, rope reads and writes queries
    # and keys, the second norm reads two and writes their sum besides, SwiGLU reads two and writes
    # one, and the last sum reads two and writes one. Each norm writes one fp32 for backward.
    numbers = 2 * HIDDEN + 2 * (QUERY + KEY) + 4 * HIDDEN + 3 * FFN + 3 * HIDDEN
    rope_tables = 2 * WIDTH
    passes = work.passes["compiled"]
    assert passes.forward == pytest.approx(2 * (numbers + rope_tables), rel=0.02)
    assert 1.5 * passes.forward < passes.backward < 2.5 * passes.forward
    assert passes.kernels < work.passes["eager"].kernels / 2
    # Without the compiler every operator goes through memory, norms in fp32.
    assert work.passes["eager"].forward > 2.5 * passes.forward
    # Recompute adds a part of forward to backward.
    again = work.passes["compiled selective"].backward - passes.backward
    assert 0 < again < passes.forward


def test_experts_are_grouped_matmuls_by_hand(kinds_of: Kinds) -> None:
    ((_, work),) = kinds_of({**PRESETS["tiny-mixtral"], **SHAPE, "num_local_experts": 4})
    assert {each for each in work.matmuls if each.groups > 1} == {
        matmul(HIDDEN, 2 * FFN, rows=2.0, groups=4),
        matmul(FFN, HIDDEN, rows=2.0, groups=4),
    }
    assert matmul(HIDDEN, 4) in work.matmuls  # the router
    # The router's gradient needs what experts have made, so backward needs the last matmul.
    assert work.last_flops == 0
    # Each of two experts gets a copy of the token and returns one, and they are weighed and summed.
    ((_, llama),) = kinds_of({**PRESETS["tiny-llama"], **SHAPE, "intermediate_size": 2 * FFN})
    routed = 2 * 2 * HIDDEN
    more = work.passes["compiled"].forward - llama.passes["compiled"].forward
    assert 2 * routed < more < 6 * routed


def test_blocks_with_and_without_a_window_are_two_kinds(kinds_of: Kinds) -> None:
    config = {**PRESETS["gemma-3-1b"], **SHAPE, "num_hidden_layers": 6, "vocab_size": 320}
    kinds = kinds_of({**config, "sliding_window": 64, "pad_token_id": 0})
    windows = {work.attentions[0].window: kind.count for kind, work in kinds}
    assert windows == {64: 5, None: 1}
    (near, far) = (work for _, work in kinds)
    assert near.matmuls == far.matmuls and near.passes == far.passes
    assert near.attention_flops(1024) < far.attention_flops(1024) / 3


@pytest.mark.long
def test_latent_attention_has_two_widths(kinds_of: Kinds) -> None:
    config: dict[str, Any] = {
        **PRESETS["deepseek-v3"],
        **SHAPE,
        **{"num_key_value_heads": HEADS, "head_dim": None, "vocab_size": 320},
        **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24, "q_lora_rank": 64},
        **{"kv_lora_rank": 40, "moe_intermediate_size": 48, "n_routed_experts": 16, "n_group": 4},
        **{"topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1},
    }
    kinds = kinds_of(config)
    assert len(kinds) == 2  # one block without experts, one with
    for _, work in kinds:
        (attention,) = work.attentions
        assert (attention.key_width, attention.value_width) == (48, 24)
        assert matmul(40, HEADS * (32 + 24)) in work.matmuls


@pytest.mark.long
def test_blocks_without_scores_have_no_attention(kinds_of: Kinds) -> None:
    config = {
        **{"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320},
        **{"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 64},
    }
    ((kind, work),) = kinds_of(config)
    assert kind.count == 2 and work.attentions == ()
    assert work.attention_flops(4096) == 0 and work.matmul_flops > 0
    assert work.passes["eager"].forward > 0


def test_the_reference_block_is_what_the_code_says(kinds_of: Kinds) -> None:
    """Forecasts scale what is counted by what Llama 3.1 8B's block was counted as."""
    ((_, work),) = kinds_of({**PRESETS["llama-3.1-8b"], "num_hidden_layers": 1})
    for is_compiled, way in ((True, "compiled"), (False, "eager")):
        passes = work.passes[way]
        counted = block_time._COUNTED_BYTES[is_compiled]
        assert passes.forward + passes.backward == pytest.approx(counted, rel=0.03)
        assert passes.kernels == pytest.approx(LLAMA_KERNELS[is_compiled]["none"], rel=0.15)
