"""Every likely reason is named where a run has that fault, and pipelines are as published."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest

from shardwise.compare.assessment import answer_for_stack
from shardwise.compare.faults import FAULTS, SpeedFault, likely_reasons
from shardwise.compare.profiles import PROFILES, Profiles, question_of
from shardwise.compare.question import SpeedQuestion
from shardwise.compare.standing import read_published
from shardwise.compare.stated import StatedRun, read_stated
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.counted import preset_spec

_DENSE = StatedRun(
    model=preset_spec("llama-3.1-8b"),
    cluster=parse_cluster("4x8xH100"),
    tokens_per_s=1000.0,
    seq=8192,
    stack="torchtitan",
)
_FLOAT8 = replace(_DENSE, precision="fp8")
_FULL = replace(_DENSE, stack="fsdp", recompute="full")
_PIPELINE = replace(
    _DENSE,
    model=preset_spec("llama-3.1-70b"),
    cluster=parse_cluster("8x8xH100"),
    stack="megatron",
    tensor=2,
    pipeline=4,
)
_FILLING = replace(_PIPELINE, global_batch=32)
_EXPERTS = replace(_DENSE, model=preset_spec("qwen3-30b-a3b"), stack="megatron", expert=8)
# Whose sequences are so short that communication is not hidden by far.
_EXPOSED = replace(_DENSE, model=preset_spec("llama-3.1-70b"), seq=2048)
_SMALL = replace(_DENSE, model=preset_spec("llama-3.2-1b"), seq=512, stack="fsdp")
_MANY = replace(_DENSE, cluster=parse_cluster("64x8xH100"))
_ONE_NODE = replace(_FULL, model=preset_spec("qwen3-30b-a3b"), cluster=parse_cluster("8xH200"))
_SETTINGS = (
    *(_DENSE, _FULL, _FLOAT8, _PIPELINE, _FILLING, _EXPERTS, _EXPOSED),
    *(_SMALL, _MANY, _ONE_NODE),
)


def question_about(stated: StatedRun) -> SpeedQuestion:
    run, _ = read_stated(stated)
    profiles = Profiles.load(PROFILES)
    return question_of(run, profiles.calibrated(run) or profiles.unseen(run))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title)
def test_a_run_with_a_fault_is_told_of_it(fault: SpeedFault) -> None:
    told = []
    for stated in _SETTINGS:
        question = question_about(stated)
        expected = question.tokens_per_s()
        gap = fault.gap(question, expected)
        if fault.usual is not None:
            gap = fault.usual(question) * (1 if fault.slower else -1)
        elif gap is None or abs(gap) < 0.05:
            continue
        assert gap is not None
        reasons = likely_reasons(question, expected * exp(-gap), number=3)
        assert len(reasons) == 3
        told.append(fault.title in [reason.title for reason in reasons])
    assert any(told)


def test_a_fault_of_a_certain_size_says_what_is_expected_with_it() -> None:
    question = question_about(_DENSE)
    slow = replace(question, decided=replace(question.decided, checkpoint_activations="full"))
    (first, *_) = likely_reasons(question, slow.tokens_per_s())
    assert first.title == "Activations are recomputed though there is room"
    assert first.tokens_per_s == pytest.approx(slow.tokens_per_s())


def test_pipelines_are_as_published() -> None:
    published = read_published()
    pipelines = [peer for peer in published.peers if peer.run.decided.pipeline > 1]
    said = [published.verdict_of(peer) for peer in pipelines]
    assert len(said) == 31
    assert said.count("as expected") >= 0.8 * len(said)


def test_fewer_micro_batches_leave_a_pipeline_idle_for_longer() -> None:
    many, few = (
        question_about(replace(_PIPELINE, global_batch=8 * passes)).tokens_per_s()
        for passes in (32, 8)
    )
    idle = [(4 - 1) / (passes + 4 - 1) for passes in (32, 8)]
    assert few / many == pytest.approx((1 - idle[1]) / (1 - idle[0]), rel=0.06)


def test_what_was_left_unsaid_is_assumed_aloud() -> None:
    answer = answer_for_stack(_PIPELINE)
    assert any("--micro-batch" in text for text in answer.assumed)
    assert any("a pipeline that is idle" in text for text in answer.assumed)
    said = replace(_DENSE, micro_batch=1, global_batch=256, precision="bf16", recompute="full",
                   network="8x400 Gb/s")  # fmt: skip
    # What no option says is told nonetheless: a row of the table may be otherwise.
    usual = "fused kernels, FlashAttention 2 or as fast, as torchtitan usually runs (--with)"
    assert answer_for_stack(said).assumed == (usual,)
