from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError
from shardwise.plan.decisions import FLOAT8_BASE, Decisions, explained, setting_paths
from shardwise.plan.explain import choice_rows, headline, memory_rows
from shardwise.plan.memory import estimate_memory
from shardwise.plan.planned import FIRST, Plan

PlanOf = Callable[..., Plan]

RUNS: tuple[tuple[str, ...], ...] = (
    (),
    ("cluster.name=2xCPU", "data.source=synthetic", "data.seq_len=64"),
    ("model.name=llama-3.1-8b", "cluster.name=4x8xH100", "optim.betas=[0.8,0.9]"),
    ("model.name=mixtral-8x7b", "cluster.name=8xH200", "memory.checkpoint_activations=0.5"),
    (
        "model.name=gpt2",
        "cluster.name=8xV100",
        "data.seq_len=1024",
        "shard.unit_classes=[GPT2Block]",
    ),
    ("cluster.name=8xH100", "shard.strategy=full_shard", "shard.reshard_after_forward=4"),
    ("data.source=text", "data.path=[a.txt,b.txt]", "model.overrides.num_hidden_layers=2"),
)


@pytest.mark.parametrize("overrides", RUNS, ids=lambda words: " ".join(words) or "defaults")
def test_a_saved_plan_is_read_back_equal(
    plan_of: PlanOf, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    plan = plan_of(*overrides)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "run.yaml"}


@pytest.mark.parametrize("overrides", RUNS, ids=lambda words: " ".join(words) or "defaults")
def test_what_was_judged_is_what_is_handed_over(
    plan_of: PlanOf, overrides: tuple[str, ...]
) -> None:
    plan = plan_of(*overrides)
    assert estimate_memory(plan.model, plan.cluster, plan.decided) == plan.memory


@pytest.mark.parametrize("overrides", RUNS, ids=lambda words: " ".join(words) or "defaults")
def test_settings_leave_nothing_open(plan_of: PlanOf, overrides: tuple[str, ...]) -> None:
    plan = plan_of(*overrides)
    settled = asdict(plan.settings)
    sections = [section for section in settled.values() if isinstance(section, dict)]
    assert not [name for section in sections for name in section if section[name] == "auto"]
    for name, path in setting_paths().items():
        section, _, field = path.partition(".")
        if section in settled:
            assert settled[section][field] == getattr(plan.decided, name)


def test_a_plan_of_a_float8_base_is_read_back_equal(plan_of: PlanOf, tmp_path: Path) -> None:
    """No value of `precision.linear` says how such a base multiplies on a GPU."""
    plan = plan_of(
        "model.name=tiny-llama", "cluster.name=1xH200", "adapter={method: lora, base: float8}"
    )
    plan.save(tmp_path / "plan.json")
    assert plan.decided.linear == FLOAT8_BASE
    assert Plan.load(tmp_path / "plan.json") == plan


def test_what_the_user_gave_is_settled_as_given(plan_of: PlanOf) -> None:
    plan = plan_of("train.steps=70", "optim.schedule=wsd", "data.source=synthetic")
    assert plan.settings.optim.decay_steps == 7
    assert plan.settings.data.tokenizer == "none"
    assert plan.settings.model.weights == "random"
    assert plan_of("optim.schedule=wsd", "optim.decay_steps=3").settings.optim.decay_steps == 3
    assert plan_of("shard.all_gather_limit=4").settings.shard.all_gather_limit == 4


@pytest.mark.parametrize("name", sorted({*explained()} - FIRST))
def test_a_plan_that_is_older_than_a_choice_has_its_default(plan_of: PlanOf, name: str) -> None:
    data = plan_of().to_dict()
    del data["choices"][name]
    old = Plan.from_dict(data)
    assert getattr(old.decided, name) == getattr(Decisions(), name)
    assert "older" in old.choices[name].why


@pytest.mark.parametrize("name", sorted(FIRST))
def test_a_plan_without_what_all_have_is_refused(
    plan_of: PlanOf, tmp_path: Path, name: str
) -> None:
    data = plan_of().to_dict()
    del data["choices"][name]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="not a plan that this version can read") as raised:
        Plan.load(tmp_path / "plan.json")
    assert name in str(raised.value.why)


def test_the_file_is_plain_json_with_every_reason(plan_of: PlanOf, tmp_path: Path) -> None:
    plan = plan_of("model.name=llama-3.1-8b", "cluster.name=8xH100")
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["choices"]["strategy"]["value"] == "full_shard"
    assert set(data["choices"]) == set(plan.choices)
    assert all(set(choice) == {"value", "why", "source"} for choice in data["choices"].values())
    assert data["model"]["total_params"] == 8030261248


def test_saving_again_replaces_the_file(plan_of: PlanOf, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan_of("train.seed=1").save(file)
    plan_of("train.seed=2").save(file)
    assert Plan.load(file).config.train.seed == 2


def test_explain_names_the_run_its_choices_and_its_memory(plan_of: PlanOf) -> None:
    plan = plan_of(
        "model.name=llama-3.1-8b",
        "cluster.name=4x8xH100",
        "data.seq_len=4096",
        "train.global_batch=512",
        "shard.strategy=hybrid_shard",
        "mesh.replicate=4",
    )
    assert headline(plan) == (
        "llama-3.1-8b (8.03B parameters) on 4x8xH100: hybrid_shard, mesh replicate=4 x shard=8, "
        "2.1M tokens a step"
    )
    rows = choice_rows(plan)
    assert [row[0] for row in rows] == list(plan.choices)
    assert all(source in ("rule", "user", "search") for _, _, source, _ in rows)
    name, total = memory_rows(plan)[-1]
    assert name == "total" and "of 79.6 GiB" in total and "the peak is in the backward" in total


def test_a_change_shows_memory_that_comes_and_goes(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: llama-3.1-8b\ncluster: 8xH100\ntrain: {micro_batch: 1}\n")
    words = ["plan", str(file), "memory.accumulate=sharded"]
    for before, after, grads in ((8, 64, "0 B -> 3.7 GiB"), (64, 8, "3.7 GiB -> 0 B")):
        change = [f"train.global_batch={before}", "--set", f"train.global_batch={after}"]
        done = CliRunner().invoke(app, words + change, catch_exceptions=False)
        shown = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert {f"global_batch {before} -> {after}", f"grads {grads}"} <= set(shown)


def test_the_run_directory_is_named_by_the_run(plan_of: PlanOf) -> None:
    assert plan_of("name=first", "runs_dir=/data/runs").run_dir == Path("/data/runs/first")
