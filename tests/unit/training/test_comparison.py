"""The loss of a run is the model's own, or the run does not begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from shardwise.errors import UserError
from shardwise.facts.head_form import PLAIN
from shardwise.metrics.events import EventLog
from shardwise.model.override import override_forward
from shardwise.parallel.mesh import build_mesh
from shardwise.plan.planned import Plan
from shardwise.training.channels import Channels
from shardwise.training.comparison import LossComparison, compare, compare_losses
from shardwise.training.heartbeat import Heartbeat
from shardwise.training.loss import attach_loss
from shardwise.training.session import Session, attach_training_loss, build_session
from shardwise.training.signals import StopRequest

MakePlan = Callable[..., Plan]
TINY: dict[str, Any] = {
    **{"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}
# Heads with a factor, a divisor and a soft cap after them.
HEADS: dict[str, dict[str, float]] = {
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 0.5},
    "gemma2": {"final_logit_softcapping": 0.1},
}


def session_of(plan: Plan) -> Session:
    session = build_session(plan, build_mesh(plan), lambda text: None)
    attach_training_loss(session, lambda text: None)
    return session


def compared(session: Session) -> LossComparison:
    return compare(session.model, session.plan, session.device)


def made(family: str, place: Path) -> str:
    """A directory with a configuration alone, for random weights."""
    config = AutoConfig.for_model(family, **TINY, **HEADS.get(family, {}))
    config.save_pretrained(place / family)
    return f"model.name={place / family}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-gpt2", "tiny-mixtral"])
def test_losses_that_are_the_same_are_found_to_be(
    lone_plan: MakePlan, preset: str, precision: str
) -> None:
    # Some CPUs take milliseconds for any matmul in bf16.
    layers = "n_layer" if preset == "tiny-gpt2" else "num_hidden_layers"
    words = (f"model={preset}", f"precision.param={precision}", f"model.overrides.{layers}=1")
    found = compared(session_of(lone_plan(*words)))
    assert found.is_equal
    assert found.ours == pytest.approx(found.own, rel=1e-2)
    assert found.own == pytest.approx(found.own_cross_entropy, rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", HEADS)
def test_a_head_that_our_loss_does_not_know_is_noticed_with_random_weights(
    lone_plan: MakePlan, tmp_path: Path, family: str, precision: str
) -> None:
    plan = lone_plan(made(family, tmp_path), f"precision.param={precision}", "data.seq_len=64")
    said: list[str] = []
    known = build_session(plan, build_mesh(plan), said.append)
    attach_training_loss(known, said.append)
    assert plan.decided.loss == "chunked" and not said
    assert compared(known).is_equal
    # A plan that does not know the form is corrected by the trial.
    plan = replace(plan, model=replace(plan.model, head=PLAIN))
    session = build_session(plan, build_mesh(plan), said.append)
    attach_training_loss(session, said.append)
    assert said == ["loss: all logits at once, because it transforms the logits after the head"]
    assert compared(session).is_equal
    # As if nobody had tried whether the head is plain.
    attach_loss(session.model, chunked=True)
    found = compared(session)
    assert not found.is_equal
    assert found.ours == pytest.approx(found.own, rel=0.05), "the means alone would hardly show it"


def test_a_module_that_computes_something_else_is_noticed(lone_plan: MakePlan) -> None:
    session = session_of(lone_plan())
    mlps: list[nn.Module] = [layer.mlp for layer in session.model.model.layers]
    override_forward(mlps, "Wrong", lambda cls: lambda self, x: 1.1 * cls.forward(self, x))
    found = compared(session)
    assert not found.is_equal
    assert found.own == pytest.approx(found.own_cross_entropy, rel=1e-5)


def test_nothing_is_left_behind(lone_plan: MakePlan) -> None:
    session = session_of(lone_plan())
    model = session.model
    override_forward([model.model.norm], "Same", lambda cls: cls.forward)

    def trace() -> tuple[Any, ...]:
        attributes = [sorted(vars(module)) for module in model.modules()]
        return (
            torch.get_rng_state().tolist(),
            {name: buffer.tolist() for name, buffer in model.named_buffers()},
            attributes,
            [len(module._forward_pre_hooks) for module in model.modules()],
            [module.training for module in model.modules()],
            [isinstance(param, DTensor) for param in model.parameters()],
            [param.grad for param in model.parameters()],
            model.config.to_json_string(),
            model.config._attn_implementation,
        )

    before = trace()
    assert before[-1] == "sdpa"
    assert compared(session).is_equal
    assert trace() == before


def test_a_short_sequence_is_enough(lone_plan: MakePlan) -> None:
    assert compared(session_of(lone_plan("data.seq_len=2"))).is_equal


# ---- what is said ------------------------------------------------------------------------------


def check(session: Session) -> tuple[list[str], list[dict[str, Any]]]:
    """What the check says and records."""
    said: list[str] = []
    path = session.plan.run_dir / "events.jsonl"
    with EventLog(path, enabled=True) as events:
        compare_losses(session, Channels(events, said.append, StopRequest(), Heartbeat(0)), 0)
    lines = path.read_text().splitlines() if path.exists() else []
    return said, [json.loads(line) for line in lines]


def scaled(session: Session, factor: float) -> None:
    """Let the loss that is trained on be another."""
    sum_loss = session.model.sum_loss

    def other(*args: Tensor) -> Tensor:
        loss: Tensor = factor * sum_loss(*args)
        return loss

    session.model.sum_loss = other


def test_both_figures_are_said_and_recorded(lone_plan: MakePlan) -> None:
    (line,), (event,) = check(session_of(lone_plan()))
    assert line.startswith(f"loss check: {event['ours']:.4f} here, {event['own']:.4f} by the model")
    assert event["event"] == "loss_check" and event["step"] == 0
    assert event["ours"] == pytest.approx(event["own"], rel=1e-5)
    assert event["apart"] <= event["allowed"]


def test_a_difference_is_an_error_that_names_both_figures(lone_plan: MakePlan) -> None:
    session = session_of(lone_plan())
    scaled(session, 1.01)
    with pytest.raises(UserError) as caught:
        check(session)
    found = compared(session)
    assert f"{found.ours:.4f}" in caught.value.what and f"{found.own:.4f}" in caught.value.what
    assert "LlamaForCausalLM.forward" in caught.value.what
    assert "train.check_loss=false" in caught.value.fix


def test_it_can_be_turned_off(lone_plan: MakePlan) -> None:
    session = session_of(lone_plan("train.check_loss=false"))
    scaled(session, 2.0)
    assert check(session) == ([], [])


@pytest.mark.parametrize(
    ("ours", "own", "is_equal"),
    [
        (float("nan"), float("nan"), True),
        (float("inf"), float("nan"), True),
        (float("nan"), 5.0, False),
        (5.0, float("nan"), False),
    ],
)
def test_two_losses_that_are_not_finite_are_left_to_the_first_step(
    ours: float, own: float, is_equal: bool
) -> None:
    assert LossComparison(ours, own, own, abs(ours - own), 0.1).is_equal is is_equal
