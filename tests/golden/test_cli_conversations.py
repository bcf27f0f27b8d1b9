"""`shardwise train` on conversations: the same losses however the work is spread, interrupted or
packed."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/data"))
from chat_templates import CHATML, make_backend

Run = Callable[..., Any]
# All windows of the data, so that a step reads every conversation.
GLOBAL_BATCH = 12
CONFIG = f"""\
model: {{name: tiny-llama, overrides: {{vocab_size: 320, num_hidden_layers: 1}}}}
data:
  {{source: jsonl, path: chat.jsonl, format: auto, tokenizer: tokenizer, seq_len: 96,
   eval_fraction: 0.25, shuffle: false}}
cluster: 1xCPU
precision: {{param: fp32}}
train: {{steps: 3, global_batch: {GLOBAL_BATCH}, micro_batch: {GLOBAL_BATCH}}}
checkpoint: {{at_end: false}}
observe: {{log_every: 1}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("conversations"), random.Random(1)
    make_backend(CHATML).save_pretrained(folder / "tokenizer")
    rows = []
    for number in range(28):
        answer = {"role": "assistant", "content": f"{number} is " + "x" * draw.randint(0, 12)}
        question = {"role": "user", "content": "hello world " * draw.randint(0, 3) + str(number)}
        rows.append({"messages": [question, answer] * draw.randint(1, 2)})
    rows.append({"messages": [{"role": "user", "content": "and then?"}]})
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def events(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def figures(folder: Path, name: str) -> list[tuple[float, float]]:
    return [(each["loss"], each["grad_norm"]) for each in events(folder, name, "step")]


@pytest.fixture(scope="module")
def base(shardwise: Run, folder: Path) -> list[tuple[float, float]]:
    done = shardwise("train", "run.yaml", "name=base", cwd=folder)
    assert "chat.jsonl:29: no assistant turn" in done.stdout
    assert "% of the sequences is padding" in done.stdout
    return figures(folder, "base")


def test_trained_tokens_are_counted_beside_tokens(folder: Path, base: Any) -> None:
    (data,), steps = events(folder, "base", "data"), events(folder, "base", "step")
    assert 0 < data["trained_tokens"] < data["tokens"]
    for step in steps:
        assert step["trained_share"] == step["trained_tokens"] / (GLOBAL_BATCH * 96) < 0.7
    evals = [each["loss"] for each in events(folder, "base", "eval")]
    assert evals[-1] < evals[0]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("train.micro_batch=6",), id="accumulation", marks=pytest.mark.long),
        pytest.param(
            (
                "cluster=2xCPU",
                "train.micro_batch=3",
                "shard.strategy=full_shard",
                "memory.loss=full",
            ),
            id="both",
        ),
    ],
)
def test_losses_do_not_depend_on_how_the_work_is_spread(
    shardwise: Run, folder: Path, base: Any, words: tuple[str, ...]
) -> None:
    name = "run-" + "-".join(word.partition("=")[2] for word in words)
    shardwise("train", "run.yaml", f"name={name}", *words, cwd=folder)
    for found, wanted in zip(figures(folder, name), base, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    evals = [[each["loss"] for each in events(folder, n, "eval")] for n in (name, "base")]
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)
    # All runs read the same tokens from one directory of the cache.
    assert len(list((folder / "runs/.cache").glob("tokens-*"))) == 1


def test_a_resumed_run_goes_on_bit_for_bit(shardwise: Run, folder: Path, base: Any) -> None:
    words = ("train", "run.yaml", "name=resumed", "checkpoint.at_end=true")
    shardwise(*words, "train.stop_after=1", cwd=folder)
    shardwise(*words, cwd=folder)
    assert figures(folder, "resumed") == base


def test_packed_trains_as_each_alone(shardwise: Run, folder: Path, base: Any) -> None:
    """Steps over all conversations: loss, gradient and update are the same."""
    (data,) = events(folder, "base", "data")
    assert data["sequences"] == GLOBAL_BATCH < data["conversations"]
    size = f"train.global_batch={data['conversations']}"
    words = ("name=one", "data.packing=one", size, "train.micro_batch=auto")
    words += ("data.group_lengths=true", "memory.compile=false")
    said = shardwise("train", "run.yaml", *words, cwd=folder).stdout
    assert "batches are of similar lengths: " in said
    for packed, alone in zip(base, figures(folder, "one"), strict=True):
        assert packed == pytest.approx(alone, rel=1e-5)
    evals = [[each["loss"] for each in events(folder, n, "eval")] for n in ("base", "one")]
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)


def bad_rows() -> list[tuple[bytes, str]]:
    """Lines that must not be trained on, and why."""
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    system, long = {"role": "system", "content": "s"}, answer | {"content": "answer " * 99}

    def line(*messages: Any) -> bytes:
        return json.dumps({"messages": messages}).encode()

    return [
        (line({"content": "a"}, answer), "a turn has no role"),
        (line(system, system, user, answer), "two system turns"),
        (line(answer, user, answer), "an assistant turn comes first"),
        (b'{"messages": "\xff"}', "invalid UTF-8"),
        (b'{"messages": "' + b"x" * 100_000_000 + b'"}', "it is longer than 32.0 MiB"),
        (line(user), "no assistant turn"),
        (line(user, answer | {"weight": 0}), "no assistant turn is trained on"),
        (line(user, long), "its answers do not fit into data.seq_len"),
    ]


def test_bad_rows_are_named_and_not_trained_on(shardwise: Run, folder: Path, base: Any) -> None:
    bad = bad_rows()
    good = (folder / "chat.jsonl").read_bytes()
    (folder / "bad.jsonl").write_bytes(b"".join(line + b"\n" for line, _ in bad) + good)
    words = ("data.path=bad.jsonl", "name=bad", "train.stop_after=1")
    said = shardwise("train", "run.yaml", *words, cwd=folder).stdout
    for number, (_, why) in enumerate(bad, start=1):
        assert f"skipped record bad.jsonl:{number}: {why}" in said
    assert figures(folder, "bad") == base[:1]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("data.path=empty.jsonl", "the files of data.path are empty: empty.jsonl"),
        ("data.chat_template=forgetful.jinja", "the chat template is not prefix-stable"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_a_rank_starts(
    shardwise: Run, folder: Path, word: str, says: str
) -> None:
    (folder / "empty.jsonl").write_bytes(b"")
    # It writes a blank after the last answer alone.
    (folder / "forgetful.jinja").write_text(CHATML + "{{ ' ' }}")
    done = shardwise("train", "run.yaml", "name=refused", word, cwd=folder, expect=2)
    assert says in done.stderr and "fix: " in done.stderr and "rank 0" not in done.stderr
    assert not (folder / "runs/refused").exists()
