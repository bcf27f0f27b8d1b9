"""`shardwise data show` through the command."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/data"))
from chat_templates import CHATML, FORGETFUL, make_backend

Run = Callable[..., Any]
CONFIG = """\
model: tiny-llama
data: {source: jsonl, path: chat.jsonl, format: auto, tokenizer: tokenizer, seq_len: 128}
cluster: 1xCPU
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    make_backend(CHATML).save_pretrained(folder / "tokenizer")
    question, answer = {"role": "user", "content": "hello?"}, {"role": "assistant", "content": "b"}
    long = question | {"content": "middle " * 200}
    thought = answer | {"reasoning_content": "r"}  # which ChatML leaves out
    rows = [
        {"messages": [question, thought, question, thought]},
        {"instruction": "add", "input": "1 2", "output": "three\x1b[2J"},
        {"messages": [long, answer]},
        {"messages": [question]},
        {"messages": [{"content": "a"}]},
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "forgetful.jinja").write_text(FORGETFUL)
    return folder


def test_samples_and_counts_are_shown(shardwise: Run, folder: Path) -> None:
    shown = shardwise("data", "show", "run.yaml", "--samples", "2", cwd=folder).stdout
    assert "chat.jsonl:1: " in shown and "chat.jsonl:2: " in shown and "chat.jsonl:3: " not in shown
    assert (
        "<|im_start|>user\nhello?<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>\n⟧<|im_start|>user"
    ) in shown
    assert "add\n\n1 2<|im_end|>" in shown
    # Text of a file does not steer the terminal.
    assert "⟦three?[2J<|im_end|>" in shown and "\x1b" not in shown
    lines = {" ".join(line.split()) for line in shown.splitlines()}
    assert "conversations 3 of 5 rows" in lines
    assert "cut 1 to data.seq_len, which keep their answers" in lines
    assert {"skipped 2 rows", "1 x no assistant turn", "1 x a turn has no role"} <= lines
    assert "chat.jsonl:4: no assistant turn" in lines
    (share,) = (line for line in lines if line.startswith("trained on "))
    assert any(line.startswith("sequences 2, of which ") for line in lines)
    assert share.endswith("%") and not share.endswith(" 0.0%") and " 100" not in share


def test_rows_limit_what_is_read(shardwise: Run, folder: Path) -> None:
    words = ("data", "show", "run.yaml", "--rows", "1", "--samples", "0")
    shown = shardwise(*words, cwd=folder).stdout
    assert "1 of 1 rows" in shown and "<|im_start|>" not in shown


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.chat_template=forgetful.jinja"], "is not prefix-stable"),
        (["data.chat_template=none.jinja"], "data.chat_template none.jinja cannot be read"),
        (["data.tokenizer=byte"], "bytes have no chat template"),
        (["data.format=text"], "data.format=text has no mask to show"),
        (["data.format=prompt"], "has no conversation to train on"),
        (["data.path=none.jsonl"], "'none.jsonl' matches no file"),
    ],
)
def test_what_cannot_be_shown_says_why(
    shardwise: Run, folder: Path, overrides: list[str], says: str
) -> None:
    done = shardwise("data", "show", "run.yaml", *overrides, cwd=folder, expect=2)
    assert says in done.stderr and "fix: " in done.stderr and "Traceback" not in done.stderr


def test_the_plan_says_how_much_is_trained_on(shardwise: Run, folder: Path) -> None:
    words = ("plan", "run.yaml", "model.overrides.vocab_size=320")
    said = " ".join(shardwise(*words, cwd=folder).stdout.split())
    assert re.search(
        r" packing best_fit rule whole conversations share sequences[^;]*; \d+% of the tokens are "
        r"trained on and \d+% of the sequences is padding, by the first 5 rows ",
        said,
    )
    # A plan may be made where the data is not.
    elsewhere = " ".join(shardwise(*words, "data.path=none.jsonl", cwd=folder).stdout.split())
    assert "the share of trained tokens is not known here: data.path 'none.jsonl' ma" in elsewhere
