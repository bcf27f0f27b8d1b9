"""`data.mixture` through the command: planned, shown, trained on one rank and on two, resumed."""

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
data:
  mixture:
    prose: {path: prose, source: text, weight: 3}
    rows: {path: rows.jsonl, field: content, weight: 1}
  seq_len: 64
  tokenizer: byte
  eval_fraction: 0.2
cluster: 1xCPU
precision: {param: fp32}
train: {steps: 6, global_batch: 8}
observe: {log_every: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "prose").mkdir()
    for number in range(8):
        text = "".join(f"{at} times {number} is {at * number}. " for at in range(30))
        (folder / "prose" / f"{number}.txt").write_text(text)
    rows = [{"content": f"{number} rows, " * 6} for number in range(6)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.dist
def test_ranks_and_resumes_read_the_same_batches(
    shardwise: Run, folder: Path, losses_of: Callable[[Path], dict[int, float]]
) -> None:
    said = shardwise("train", "run.yaml", "name=one", cwd=folder).stdout
    assert "data prose: 75.0% of what is read; " in said
    lines = said.splitlines()
    (at,) = (place for place, line in enumerate(lines) if line.startswith("data rows: 25.0% "))
    rows, size = lines[at].split(), lines[at + 1].split()
    assert size[1] == "documents," and size[3] == "sequences,"
    assert float(rows[-2]) == pytest.approx(12 / int(size[2]), rel=0.01)
    losses = losses_of(folder / "runs" / "one")
    two = ("name=two", "cluster=2xCPU", "shard.strategy=full_shard")
    shardwise("train", "run.yaml", *two, "train.stop_after=3", cwd=folder)
    shardwise("train", "run.yaml", *two, cwd=folder)
    assert losses_of(folder / "runs" / "two") == pytest.approx(losses, rel=1e-5)
    weight = "data.mixture.rows.weight=2"
    done = shardwise("train", "run.yaml", *two, weight, "train.steps=7", cwd=folder, expect=2)
    assert "cannot go on at step 6 with other data" in done.stderr
    assert "data.mixture.rows.weight: 1 -> 2" in done.stderr


def test_a_plan_and_data_show_say_what_each_dataset_has(shardwise: Run, folder: Path) -> None:
    for words in (("plan", "run.yaml"), ("data", "show", "run.yaml")):
        said = shardwise(*words, cwd=folder).stdout
        table = {line.split()[0]: line.split() for line in said.splitlines() if line.strip()}
        assert table["prose"][1:3] == ["75.0%", "2.3k"] and table["rows"][1] == "25.0%"
        assert float(table["rows"][3]) > float(table["prose"][3]) > 0
    run = json.loads(shardwise("plan", "run.yaml", "--json", cwd=folder).stdout)["run"]
    assert [(part["name"], part["share"]) for part in run["mixture"]] == [
        ("prose", 0.75),
        ("rows", 0.25),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.mixture.rows.weight=-1"], "rows: its weight is -1, which is no number above 0"),
        (["data.mixture.rows.source=csv"], "rows: its source is csv, which is none of text, jsonl"),
        (["data.mixture.rows.wieght=1"], "rows: unknown key `wieght`"),
        (["data.mixture={a: {path: dir, weight: 1}}"], "dir does not tell its source: add source"),
        (["data.mixture.rows.path=none.jsonl"], "rows: data.mixture.rows.path 'none.jsonl' match"),
        (["data.mixture.rows.field=text"], "rows: data.mixture.rows.source=jsonl has no text"),
        (["data.path=some.txt", "data.source=text"], "each of its datasets has a path of its own"),
    ],
)
def test_a_mixture_that_cannot_be_read_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    said = refused(folder, monkeypatch, words)
    assert says in said and "fix: " in said
