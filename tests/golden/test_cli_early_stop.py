"""A model that learns its few documents by heart gets worse on others: the run ends, and the best
step is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
CONFIG = """\
model: {name: tiny-llama, overrides: {num_hidden_layers: 1, hidden_size: 64, intermediate_size: 64,
  num_attention_heads: 2, num_key_value_heads: 2, head_dim: 32}}
data: {source: jsonl, path: few.jsonl, seq_len: 64, eval_fraction: 0.5}
cluster: 1xCPU
precision: {param: fp32}
train: {steps: 60, global_batch: 2, eval_every: 4, patience: 2}
optim: {lr: 0.02}
checkpoint: {every: 6, keep: 1}
"""


def evals_of(run_dir: Path) -> list[tuple[int, float, bool]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [(e["step"], e["loss"], e["best"]) for e in events if e["event"] == "eval"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("early"), random.Random(0)
    rows = [{"text": "".join(draw.choices("abcdefgh", k=120))} for _ in range(8)]
    (folder / "few.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def test_a_run_ends_early_and_its_best_step_is_kept(shardwise: Run, folder: Path) -> None:
    said = shardwise("train", "run.yaml", "name=whole", cwd=folder).stdout
    evals = evals_of(folder / "runs" / "whole")
    best = min(evals[1:], key=lambda each: each[1])[0]
    assert best < evals[-1][0] < 60 and [step for step, _, is_best in evals if is_best][-1] == best
    assert len(evals) - 1 - [step for step, *_ in evals].index(best) == 2
    assert (
        f"stopped early after step {evals[-1][0]} of 60: the held-out loss has not fallen" in said
    )
    assert f"at step {best} (kept; --best names it)" in said
    assert "next: shardwise export runs/whole --to exported --best" in said
    listed = shardwise("checkpoint", "ls", "runs/whole", cwd=folder).stdout.splitlines()[1:]
    assert [line.split()[0] for line in listed] == [str(best), str(evals[-1][0])]
    assert " best" in listed[0] and " best" not in listed[1]
    again = shardwise("train", "run.yaml", "name=whole", cwd=folder).stdout
    assert "nothing to do: step" in again and f"at step {best}" in again
    report = folder / "runs" / "whole" / "report.html"
    shardwise("report", "runs/whole", cwd=folder)
    assert f"at step {best}, kept" in report.read_text() and "stopped early" in report.read_text()
    to = ("--to", "exported", "--best")
    assert (
        f"step-{best:08d} -> exported" in shardwise("export", "runs/whole", *to, cwd=folder).stdout
    )
    shardwise("generate", "runs/whole", "abc", "--best", "--max-tokens", "2", cwd=folder)


def test_a_run_that_was_stopped_ends_where_it_would_have(shardwise: Run, folder: Path) -> None:
    evals = evals_of(folder / "runs" / "whole")
    shardwise("train", "run.yaml", "name=parts", f"train.stop_after={evals[-2][0]}", cwd=folder)
    shardwise("train", "run.yaml", "name=parts", cwd=folder)
    assert evals_of(folder / "runs" / "parts") == evals
