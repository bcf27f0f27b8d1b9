"""`train.epochs` through the command: planned, counted, trained, resumed and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from shardwise.data.order import index_at

Run = Callable[..., Any]
CONFIG = """\
model: {name: tiny-llama, overrides: {num_hidden_layers: 1, hidden_size: 64, intermediate_size: 64,
  num_attention_heads: 2, num_key_value_heads: 2, head_dim: 32}}
data: {source: text, path: some.txt, seq_len: 64, tokenizer: byte}
cluster: 1xCPU
precision: {param: fp32}
train: {epochs: 1.5, global_batch: 4}
observe: {log_every: 1}
"""
# 640 bytes and the end of the document are ten sequences; one pass and a half are four steps.
TEXT = "".join(f"{number:03d}: so much " for number in range(50))[:640]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("epochs")
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "some.txt").write_text(TEXT)
    return folder


def test_epochs_are_counted_once_the_data_was_read(
    shardwise: Run, folder: Path, losses_of: Callable[[Path], dict[int, float]]
) -> None:
    planned = shardwise("plan", "run.yaml", cwd=folder).stdout
    assert " steps " in planned and "1.5 (about 640 tokens" in planned
    said = shardwise("train", "run.yaml", "name=whole", cwd=folder).stdout
    assert "train.epochs=1.5 over 10 sequences: 4 steps of 4" in said
    assert "4 of 4 steps" in said and "train.epochs=3   (twice as long)" in said
    whole = folder / "runs" / "whole"
    assert json.loads((whole / "plan.json").read_text())["config"]["train"]["steps"] == 4
    # The same run by its number of steps has the same rates, and so the same losses.
    shardwise("train", "run.yaml", "name=steps", "train.epochs=null", "train.steps=4", cwd=folder)
    assert losses_of(folder / "runs" / "steps") == losses_of(whole)
    # What the run directory says can be read as a configuration again.
    shardwise("plan", "runs/whole/config.yaml", cwd=folder)
    longer = shardwise("train", "run.yaml", "name=whole", "train.epochs=2", cwd=folder).stdout
    assert "train.epochs: 1.5 -> 2.0" in longer and "5 of 5 steps" in longer


def test_a_pass_reads_every_sequence_once() -> None:
    read = [index_at(0, position, 10, True) for position in range(20)]
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10)) and read[:10] != read[10:]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.steps=7"], "train.steps=7 says how long the run is, too"),
        (["train.epochs=0"], "it must be above 0"),
        (["data={source: synthetic, path: null}"], "data.source=synthetic has no end"),
    ],
)
def test_what_epochs_do_not_go_with_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    said = refused(folder, monkeypatch, words)
    assert says in said and "fix: " in said


def test_settings_that_name_a_step_are_judged_once_the_steps_are_counted(
    shardwise: Run, folder: Path
) -> None:
    words = ("name=refused", "optim.warmup_steps=9", "train.stop_after=5")
    said = " ".join(shardwise("train", "run.yaml", *words, cwd=folder, expect=2).stderr.split())
    assert "optim.warmup_steps is 9, but the whole run has train.steps=4" in said
    assert "it must lie between 1 and train.steps=4" in said and "fix: " in said


def test_a_plan_without_the_data_says_that_steps_are_not_known(
    shardwise: Run, folder: Path
) -> None:
    said = shardwise("plan", "run.yaml", "data.path=none.txt", cwd=folder).stdout
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line.strip()}
    assert rows["steps"][1] == "-" and rows["time"][1] == "-"
    assert "train.epochs=1.5 becomes steps once the data was read" in " ".join(said.split())
