"""Callbacks through the command and from Python: what they see, and what becomes of their
errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from commands import rank_environment, run_forked

Run = Callable[..., Any]
CONFIG = """\
model: {name: tiny-llama, overrides: {num_hidden_layers: 1, hidden_size: 64, intermediate_size: 64,
  num_attention_heads: 2, num_key_value_heads: 2, head_dim: 32}}
data: {source: synthetic, seq_len: 16, eval_fraction: 0.1, eval_sequences: 2}
cluster: 2xCPU
precision: {param: fp32}
train: {steps: 4, global_batch: 2, eval_every: 2}
checkpoint: {every: 2}
observe: {log_every: 2}
"""
WATCH = """
import json, os
import shardwise

def note(moment):
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps([type(moment).__name__, moment.step, os.environ["RANK"]]) + "\\n")
    if isinstance(moment, shardwise.CheckpointSaved):
        assert moment.path.is_dir() and moment.path.parent.parent == moment.run_dir

def fail(moment):
    if isinstance(moment, shardwise.StepLogged) and moment.step == 2:
        moment.loss = 0.0

number = 3
"""
SCRIPT = """
import shardwise, watch
from shardwise.errors import UserError

def local(moment): ...

try:
    shardwise.train("run.yaml", callbacks=[local])
except UserError as error:
    print(error)
shardwise.train("run.yaml", "name=script", callbacks=[watch.note, "watch:note"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "watch.py").write_text(WATCH)
    return tmp_path


def seen(folder: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    assert {rank for *_, rank in lines} == {"0"}
    return [(kind, step) for kind, step, _ in lines]


@pytest.mark.dist
def test_the_first_rank_calls_them_and_an_exception_ends_the_run(
    shardwise: Run, folder: Path
) -> None:
    shardwise("train", "run.yaml", "observe.callbacks=[watch:note]", cwd=folder)
    found = seen(folder)
    assert [step for kind, step in found if kind == "StepLogged"] == [1, 2, 4]
    assert [step for kind, step in found if kind == "Evaluated"] == [0, 2, 4]
    assert [step for kind, step in found if kind == "CheckpointSaved"] == [2, 4]
    words = ("name=fails", "observe.callbacks=[watch:fail]")
    done = shardwise("train", "run.yaml", *words, cwd=folder, expect=2)
    assert "the callback watch:fail failed at step 2" in done.stderr
    assert "FrozenInstanceError" in done.stderr and "fix: mend it, or leave it out" in done.stderr
    logs = [path.read_text() for path in (folder / "runs" / "fails" / "logs").rglob("rank-0.log")]
    assert any("in fail" in text and "moment.loss = 0.0" in text for text in logs)


def test_python_takes_functions_that_ranks_can_import(folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPT)
    environ = rank_environment() | {"PYTHONPATH": str(folder)}
    said = run_forked(folder, module="script", cwd=folder, environ=environ).stdout
    assert "the callback local of " in said and "cannot be imported by ranks" in said
    # A function that is named twice is one.
    assert seen(folder).count(("StepLogged", 4)) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("watch", "each of them must name a module and a function in it"),
        ("nowhere:note", "the callback nowhere:note cannot be imported"),
        ("watch:none", "the callback watch:none cannot be imported"),
        ("watch:number", "the callback watch:number is no function, but int"),
    ],
)
def test_what_cannot_be_called_is_an_error_before_ranks_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "watch", raising=False)
    said = refused(folder, monkeypatch, [f"observe.callbacks=[{name}]"])
    assert says in said and "fix: " in said
