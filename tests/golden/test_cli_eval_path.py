"""`data.eval_path` and `data.eval_split` through the command: held-out data of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

Run = Callable[..., Any]
CONFIG = """\
model: {name: tiny-llama, overrides: {num_hidden_layers: 1, hidden_size: 64, intermediate_size: 64,
  num_attention_heads: 2, num_key_value_heads: 2, head_dim: 32}}
data: {source: text, path: some.txt, eval_path: other.txt, seq_len: 64, tokenizer: byte}
cluster: 1xCPU
precision: {param: fp32}
train: {steps: 4, global_batch: 4, eval_every: 2, patience: 3}
observe: {log_every: 1}
"""


def evals_of(run_dir: Path) -> dict[int, float]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return {each["step"]: each["loss"] for each in events if each["event"] == "eval"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held-out")
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "some.txt").write_text("so much depends upon a red wheel barrow. " * 40)
    # 512 bytes and the end of the document are eight sequences.
    (folder / "other.txt").write_text(
        ("glazed with rain water beside the white chickens. " * 20)[:512]
    )
    return folder


def test_the_loss_is_that_of_the_other_file(
    shardwise: Run, folder: Path, losses_of: Callable[[Path], dict[int, float]]
) -> None:
    said = shardwise("train", "run.yaml", "name=held", cwd=folder).stdout
    assert "on held-out text" in said and "  held-out loss  " in said
    evals = evals_of(folder / "runs" / "held")
    assert list(evals) == [0, 2, 4]
    # All of it as one batch of training data has this loss before the first update.
    words = ("data.path=other.txt", "data.eval_path=null", "train.global_batch=8")
    one = ("name=one", "train.steps=1", "train.eval_every=0", "train.patience=0")
    shardwise("train", "run.yaml", *words, *one, cwd=folder)
    assert losses_of(folder / "runs" / "one")[1] == pytest.approx(evals[0], rel=1e-6)
    # The training data is whole, so a run without held-out data has the same losses.
    plain = ("name=plain", "data.eval_path=null", "train.eval_every=0", "train.patience=0")
    shardwise("train", "run.yaml", *plain, cwd=folder)
    assert losses_of(folder / "runs" / "plain") == losses_of(folder / "runs" / "held")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.eval_fraction=0.1"], "data.eval_path or data.eval_split names what is held out"),
        (["data.eval_path=none.txt"], "held-out: data.eval_path 'none.txt' matches no file"),
        (["data.eval_path=some.txt"], "that is what is trained on"),
        (["data.eval_split=test"], "data.source=text has no splits"),
        (["data={source: stdlib, path: null, eval_path: dir}"], "its name does not tell how it is"),
    ],
)
def test_held_out_data_that_cannot_be_read_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    said = refused(folder, monkeypatch, words)
    assert says in said and "fix: " in said


def test_a_split_of_a_dataset_is_held_out(shardwise: Run, folder: Path) -> None:
    from datasets import Dataset, DatasetDict

    texts = [f"{number} and {number + 1}. " * 20 for number in range(8)]
    splits = {
        "train": Dataset.from_dict({"text": texts}),
        "test": Dataset.from_dict({"text": texts[:2]}),
    }
    DatasetDict(splits).save_to_disk(folder / "saved")
    data = "data={source: datasets, path: saved, eval_path: null, eval_split: test}"
    said = shardwise("train", "run.yaml", "name=split", data, "train.steps=2", cwd=folder).stdout
    assert "eval at step 2" in said
