"""A family that a format does not suit is told so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from shardwise.errors import UserError
from shardwise.parallel.mesh import build_mesh
from shardwise.plan.planned import Plan
from shardwise.training.session import attach_training_loss, build_session

MakePlan = Callable[..., Plan]


def attach(plan: Plan) -> None:
    session = build_session(plan, build_mesh(plan), lambda text: None)
    attach_training_loss(session, lambda text: None)


def test_a_family_that_mixes_formats_is_refused_in_bf16(
    lone_plan: MakePlan, tmp_path: Path
) -> None:
    shape = {"vocab_size": 131, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    AutoConfig.for_model("openai-gpt", **shape).save_pretrained(tmp_path / "gpt")
    model = f"model.name={tmp_path / 'gpt'}"
    attach(lone_plan(model, "precision.param=fp32"))
    with pytest.raises(UserError, match="openai-gpt models do not run in bf16") as caught:
        attach(lone_plan(model, "precision.param=bf16"))
    assert "dtype" in caught.value.why
    assert caught.value.fix == "write precision.param=fp32"
