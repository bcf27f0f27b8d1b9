"""What a resume sees as changed, and what it makes of that; no ranks, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

from shardwise.checkpoint.may_resume import judge_resume
from shardwise.checkpoint.store import Checkpoint
from shardwise.config.load import load_config
from shardwise.errors import ExitCode, UserError
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan

WORDS = ("data.source=text", "data.path=a.txt", "data.seq_len=64", "train.global_batch=8")


def plan_of(*words: str) -> Plan:
    return choose_plan(load_config(None, ["cluster=2xCPU", *WORDS, *words]), environ={})


def checkpoint_of(root: Path, plan: Plan | None, data: str | None = "sha256:a") -> Checkpoint:
    found = make_checkpoint(root, 5, global_batch=8, data=data)
    text = "{}" if plan is None else json.dumps(plan.to_dict())
    (found.path / "plan.json").write_text(text)
    return found


def changes_of(found: Checkpoint, plan: Plan, data: str | None = None) -> list[str]:
    return [str(change) for change in judge_resume(found, plan, data).changes]


def test_nothing_changed(tmp_path: Path) -> None:
    found = judge_resume(checkpoint_of(tmp_path, plan_of()), plan_of(), "sha256:a")
    assert (found.changes, found.restarts_data, found.position) == ((), False, 5)


def test_settings_and_decisions_are_shown_once(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path, plan_of("name=here", "train.micro_batch=2"))
    shown = changes_of(found, plan_of("name=there", "optim.betas=[0.9,0.99]"))
    assert "optim.betas: [0.9, 0.95] -> [0.9, 0.99]" in shown
    assert "train.micro_batch: 2 -> auto" in shown
    assert any(line.startswith("micro_batch (planned): 2 -> ") for line in shown)
    assert not any("here" in line for line in shown)
    # What the user says is not said again as the planner's decision.
    shown = changes_of(checkpoint_of(tmp_path / "b", plan_of()), plan_of("train.micro_batch=2"))
    assert [line for line in shown if "micro_batch" in line] == ["train.micro_batch: auto -> 2"]


def test_the_batch_that_was_planned_counts_and_not_its_spelling(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path, plan_of("train.global_batch=auto"))
    assert judge_resume(found, plan_of()).restarts_data is False


@pytest.mark.parametrize("data", ["sha256:a", None])
def test_other_names_of_the_same_tokens_are_shown_and_accepted(
    tmp_path: Path, data: str | None
) -> None:
    shown = changes_of(checkpoint_of(tmp_path, plan_of()), plan_of("data.path=b.txt"), data)
    assert shown == ["data.path: a.txt -> b.txt"]


@pytest.mark.parametrize("word", ["data.path=b.txt", "data.eval_fraction=0.1"])
def test_other_tokens_are_refused_by_the_setting_that_names_them(tmp_path: Path, word: str) -> None:
    found = checkpoint_of(tmp_path, plan_of())
    with pytest.raises(UserError, match=word.split("=")[0]):
        judge_resume(found, plan_of(word), "sha256:b")
    again = judge_resume(found, plan_of(word, "data.on_change=restart"), "sha256:b")
    assert (again.restarts_data, again.position) == (True, 0)


def test_an_old_checkpoint_is_taken_at_its_word(tmp_path: Path) -> None:
    found = checkpoint_of(tmp_path, plan_of(), data=None)
    accepted = judge_resume(found, plan_of(), "sha256:b")
    assert (accepted.remembers_data, accepted.restarts_data) == (False, False)
    with pytest.raises(UserError, match=r"data\.path: a\.txt -> b\.txt") as caught:
        judge_resume(found, plan_of("data.path=b.txt"))
    assert "too old to tell" in caught.value.why


def test_a_plan_of_another_version_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    old: dict[str, Any] = plan_of().to_dict()
    del old["config"]["data"]["on_change"], old["choices"]["kernels"]
    old["config"]["optim"]["forgotten"] = 1
    old["hf_config"]["transformers_version"] = "4.0"
    found = checkpoint_of(tmp_path, plan_of())
    (found.path / "plan.json").write_text(json.dumps(old))
    assert changes_of(found, plan_of("data.on_change=restart")) == [
        "data.on_change: refuse -> restart"
    ]
    with pytest.raises(UserError, match=r"train\.seed: 0 -> 3"):
        judge_resume(checkpoint_of(tmp_path / "bare", None), plan_of("train.seed=3"))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("model.overrides.num_hidden_layers=2", "num_hidden_layers: 2 -> 4"),
        ("model.overrides.hidden_size=64", "hidden_size: 64 -> 128"),
        ("model.overrides.tie_word_embeddings=true", "tie_word_embeddings: true -> "),
    ],
)
def test_the_first_fields_of_another_model_are_named(tmp_path: Path, word: str, says: str) -> None:
    found = checkpoint_of(tmp_path, plan_of(word))
    with pytest.raises(UserError, match=says):
        judge_resume(found, plan_of("data.on_change=restart"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"config": []}', "[" * 900])
def test_a_plan_that_is_none_is_left_to_the_ranks_and_accepted_by_none(
    tmp_path: Path, text: str
) -> None:
    found = checkpoint_of(tmp_path, plan_of())
    (found.path / "plan.json").write_text(text)
    assert judge_resume(found, plan_of()).changes == ()
    with pytest.raises(UserError, match="is damaged") as caught:
        judge_resume(found, plan_of(), "sha256:a")
    assert caught.value.code == ExitCode.VERIFY_FAILED
    assert "plan.json: is not a plan" in caught.value.why


@pytest.mark.parametrize(("before", "now"), [("fp32", "int8"), ("int8", "fp32"), ("bf16", "int8")])
def test_codes_are_not_read_as_moments(tmp_path: Path, before: str, now: str) -> None:
    found = checkpoint_of(tmp_path, plan_of(f"optim.state={before}"))
    with pytest.raises(UserError, match=f"optim.state={before}, and this run has {now}"):
        judge_resume(found, plan_of(f"optim.state={now}"))
    assert judge_resume(found, plan_of(f"optim.state={before}")).changes == ()
