"""How a run may differ from what was stated: each as the question that is then asked.

None says that a run cannot differ so. Some differences may have any size: of these there is the
usual one, as a logarithm of the step time. These sizes are chosen by hand.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2
from typing import Any

from shardwise.compare.question import SpeedQuestion
from shardwise.facts.gpus import NODE
from shardwise.plan.block_time import block_seconds
from shardwise.plan.host_time import host_seconds


def _decide(question: SpeedQuestion, **changes: Any) -> SpeedQuestion:
    return replace(question, decided=replace(question.decided, **changes))


def _soften(question: SpeedQuestion, **changes: Any) -> SpeedQuestion:
    return replace(question, software=replace(question.software, **changes))


def recompute_all(question: SpeedQuestion) -> SpeedQuestion | None:
    """Every block runs again in backward."""
    if question.decided.checkpoint_activations == "full":
        return None
    return _decide(question, checkpoint_activations="full")


def recompute_nothing(question: SpeedQuestion) -> SpeedQuestion | None:
    """No block runs again."""
    if question.decided.checkpoint_activations == "none":
        return None
    return _decide(question, checkpoint_activations="none")


def eager(question: SpeedQuestion) -> SpeedQuestion | None:
    """Norms, rope and activations are kernels of their own."""
    return _decide(question, compile=False) if question.decided.compile else None


def compiled(question: SpeedQuestion) -> SpeedQuestion | None:
    """They are fused."""
    return None if question.decided.compile else _decide(question, compile=True)


def plain_attention(question: SpeedQuestion) -> SpeedQuestion | None:
    """A kernel that holds all scores, which is about an eighth as fast."""
    return _soften(question, attention_factor=question.software.attention_factor / 8)


def older_attention(question: SpeedQuestion) -> SpeedQuestion | None:
    """A kernel that is half as fast."""
    return _soften(question, attention_factor=question.software.attention_factor / 2)


def newer_attention(question: SpeedQuestion) -> SpeedQuestion | None:
    """A kernel that is twice as fast."""
    return _soften(question, attention_factor=question.software.attention_factor * 2)


def one_card(question: SpeedQuestion) -> SpeedQuestion | None:
    """One network card of eight carries everything, as where NCCL falls back to TCP."""
    fabric = question.fabric
    if _world(question) <= fabric.domain:
        return None
    slow = replace(fabric.between, bytes_per_s=fabric.between.bytes_per_s / NODE)
    return replace(question, fabric=replace(fabric, between=slow))


def in_turn(question: SpeedQuestion) -> SpeedQuestion | None:
    """Nothing runs beside compute."""
    ranks = question.decided.shard * question.decided.replicate
    return _soften(question, overlaps=False) if ranks > 1 else None


def few_passes(question: SpeedQuestion) -> SpeedQuestion | None:
    """As many micro-batches as stages."""
    decided = question.decided
    if decided.pipeline == 1 or decided.accumulation <= decided.pipeline:
        return None
    return _decide(question, accumulation=decided.pipeline)


def many_passes(question: SpeedQuestion) -> SpeedQuestion | None:
    """Eight times as many micro-batches."""
    if question.decided.pipeline == 1:
        return None
    return _decide(question, accumulation=8 * question.decided.accumulation)


def uneven_experts(question: SpeedQuestion) -> SpeedQuestion | None:
    """The busiest rank has twice its share of tokens."""
    if question.model.num_experts < 2 or question.decided.expert == 1:
        return None
    software = question.software
    return _soften(
        question,
        grouped_factor=software.grouped_factor / 2,
        expert_factor=2 * software.expert_factor,
    )


def small_experts(question: SpeedQuestion) -> SpeedQuestion | None:
    """One launch for each expert instead of a grouped matmul."""
    if question.model.num_experts < 2:
        return None
    return _soften(question, grouped_factor=question.software.grouped_factor / 3)


def no_float8(question: SpeedQuestion) -> SpeedQuestion | None:
    """Linear layers in 16 bits."""
    return None if question.decided.linear == "param" else _decide(question, linear="param")


def float8(question: SpeedQuestion) -> SpeedQuestion | None:
    """Linear layers in eight bits."""
    if question.decided.linear != "param" or "fp8" not in question.rates.matmul_flops:
        return None
    return _decide(question, linear="float8", float8_gather=True)


def frozen(question: SpeedQuestion) -> SpeedQuestion | None:
    """No gradients of the base model."""
    return None if question.software.frozen else _soften(question, frozen=True)


def _world(question: SpeedQuestion) -> int:
    return question.decided.world_size


def of_all_gpus(question: SpeedQuestion) -> float | None:
    """How many times the figure of one GPU all of them have."""
    return float(_world(question)) if _world(question) > 1 else None


def of_a_node(question: SpeedQuestion) -> float | None:
    """The same of a node."""
    return float(NODE) if _world(question) > NODE else None


# ---- of any size -----------------------------------------------------------------------------


def waits_for_data(question: SpeedQuestion) -> float:
    """Reading data holds small models up, which take many tokens a second."""
    return 0.05 if question.model.total_params > 2e9 else 0.08


def waits_for_ranks(question: SpeedQuestion) -> float:
    """Among more nodes there is more often a slow one."""
    return 0.02 + 0.025 * log2(max(1.0, _world(question) / NODE))


def is_throttled(question: SpeedQuestion) -> float:
    """Any GPU may be, by heat or by power."""
    return 0.07


def waits_for_host(question: SpeedQuestion) -> float:
    """Launches show where the kernels of a block are short."""
    about = (question.model, question.decided, question.rates, question.software)
    block, host = block_seconds(*about), host_seconds(*about)
    return 0.02 + 0.3 * min(1.0, host / (block.forward + block.backward))


def waits_for_memory(question: SpeedQuestion) -> float:
    """Blocks of experts have tensors of other sizes in each step."""
    return 0.10 if question.model.num_experts > 1 else 0.03


def counts_otherwise(question: SpeedQuestion) -> float:
    """Padding, or another sequence length."""
    return 0.05
