from __future__ import annotations

from pathlib import Path

import pytest
from migrated import fate, migrated, why

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.migrate.migration import migrate_file


def test_the_yaml_loads_and_says_where_it_is_from(tmp_path: Path) -> None:
    done = migrated(tmp_path, {"distributed_type": "FSDP", "mixed_precision": "bf16"})
    file = tmp_path / "run.yaml"
    file.write_text(done.yaml)
    config = load_config(file)
    assert config.precision.param == "bf16" and config.shard.strategy == "full_shard"
    assert "Accelerate" in done.yaml.splitlines()[0]


def test_a_value_that_no_run_could_have_is_taken_out_and_its_line_says_why(tmp_path: Path) -> None:
    tree = {"learning_rate": -1, "max_steps": 10, "warmup_steps": 20, "bf16": True}
    done = migrated(tmp_path, tree)
    assert "optim.lr" not in done.settings and "optim.warmup_steps" not in done.settings
    assert done.settings["train.steps"] == 10
    assert fate(done, "learning_rate") == "dropped" and "above 0" in why(done, "learning_rate")
    assert "train.steps=10" in why(done, "warmup_steps")


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    tree = {"learning_rate": 1e-4, "max_steps": -1, "warmup_ratio": 0.1, "num_train_epochs": 3}
    done = migrated(tmp_path, tree, "optim.lr=1e-5", "train.steps=200", "model=tiny-llama")
    assert done.settings["optim.lr"] == 1e-5
    assert "the command line says" in why(done, "learning_rate")
    assert done.settings["optim.warmup_steps"] == 20
    assert done.settings["model.name"] == "tiny-llama"


def test_without_steps_epochs_stay_and_shares_are_dropped_with_the_setting_to_write(
    tmp_path: Path,
) -> None:
    done = migrated(tmp_path, {"warmup_ratio": 0.1, "num_train_epochs": 3, "learning_rate": 1e-4})
    assert "train.steps" in why(done, "warmup_ratio")
    assert done.settings["train.epochs"] == 3 and "train.steps" not in done.settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not valid YAML"),
        ("", "is empty"),
        ("foo: 1\nbar: 2\n", "no tool that we know"),
        ("model: tiny-llama\n", "a configuration of shardwise already"),
        ("- 1\n", "expected a mapping"),
        ("distributed_type: FSDP\ndistributed_type: NO\n", "given twice"),
    ],
)
def test_a_file_that_is_no_configuration_is_an_error_with_a_fix(
    tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        migrate_file(file, None, [])
    assert caught.value.fix


def test_from_names_the_tool(tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("fp16: {enabled: true}\n")
    assert migrate_file(file, "deepspeed", []).settings["precision.param"] == "fp16"
    with pytest.raises(UserError, match="--from x is not known"):
        migrate_file(file, "x", [])
