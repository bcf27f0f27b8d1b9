"""`shardwise train` on preferences: a made preference is learnt and generalises, references are
computed once for a model and its data, and every objective trains."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.facts.presets import PRESETS
from shardwise.report.collect import collect_runs
from shardwise.report.html import render_report

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/data"))
from chat_templates import CHATML, make_backend

Run = Callable[..., Any]
pytestmark = pytest.mark.dist

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 320}
CONFIG = """\
model: {name: base}
adapter: {method: lora, rank: 8, alpha: 16}
data:
  {source: jsonl, path: pairs.jsonl, format: pairs, tokenizer: tokenizer, seq_len: 128,
   eval_fraction: 0.25}
preference: {objective: dpo, beta: 0.5}
cluster: 1xCPU
precision: {param: fp32}
optim: {lr: 2e-2, weight_decay: 0}
train: {steps: 30, global_batch: 8, micro_batch: 8}
checkpoint: {at_end: false}
observe: {log_every: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose chosen answer is the one that agrees, in other words each time."""
    folder, draw = tmp_path_factory.mktemp("preferences"), random.Random(5)
    make_backend(CHATML).save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**PRESETS["tiny-llama"], **SHAPE})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")

    def words() -> str:
        return " ".join(draw.choice(("hello", "world", "user", "tool")) for _ in range(3))

    def answer(start: str) -> str:
        return f"{start} {words()}"

    pairs, labelled = [], []
    for number in range(120):
        prompt = f"{number} {words()}"
        good, bad = answer("yes"), answer("nay")
        asked = {"role": "user", "content": prompt}
        both = [[asked, {"role": "assistant", "content": text}] for text in (good, bad)]
        as_text = {"prompt": prompt, "chosen": good, "rejected": bad}
        pairs.append(as_text if number % 2 else {"chosen": both[0], "rejected": both[1]})
        is_good = draw.random() < 0.5
        labelled.append(
            {"prompt": prompt, "completion": good if is_good else bad, "label": is_good}
        )
    pairs.append({"prompt": "alike", "chosen": "same", "rejected": "same"})
    for name, rows in (("pairs", pairs), ("labelled", labelled)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def events(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def figures(folder: Path, name: str) -> list[tuple[float, float, float]]:
    steps = events(folder, name, "step")
    return [(each["loss"], each["grad_norm"], each["preference"]["margin"]) for each in steps]


def references(folder: Path) -> set[str]:
    return {path.name for path in (folder / "runs/.cache").glob("reference-*")}


@pytest.fixture(scope="module")
def learnt(shardwise: Run, folder: Path) -> str:
    done = shardwise("train", "run.yaml", "name=learnt", cwd=folder)
    return str(done.stdout)


def test_dpo_over_adapters_learns_a_made_preference(folder: Path, learnt: str) -> None:
    assert "pairs.jsonl:121: 'chosen' and 'rejected' are the same" in learnt
    assert "reference: log-probabilities of 240 answers in" in learnt
    first, last = (events(folder, "learnt", "eval")[at] for at in (0, -1))
    # Before the first step the model is its own reference: no margin, and a loss of ln 2.
    assert first["loss"] == pytest.approx(0.693147, rel=1e-5)
    assert first["preference"]["margin"] == pytest.approx(0, abs=1e-5)
    assert last["preference"]["accuracy"] > 0.95
    assert last["preference"]["margin"] > 1 and last["loss"] < 0.3
    step = events(folder, "learnt", "step")[-1]["preference"]
    assert step["margin"] == pytest.approx(step["chosen"] - step["rejected"])
    assert "accuracy 100.0%  margin" in learnt
    assert f"(accuracy {first['preference']['accuracy']:.1%} -> 100.0%)" in learnt


def test_the_report_has_curves_of_preferences(folder: Path, learnt: str) -> None:
    page = render_report(collect_runs([folder / "runs/learnt"]), time.time())
    for name in ("accuracy", "margin"):
        # A point for each of 30 steps, and for the evaluations before and after them.
        assert re.search(rf'id="plot-{name}"[^>]* data-points="32"', page)


def test_pairs_are_shown_with_their_masks_and_planned(shardwise: Run, folder: Path) -> None:
    shown = shardwise("data", "show", "run.yaml", "--samples", "1", cwd=folder).stdout
    assert "pairs.jsonl:1, chosen: " in shown and "pairs.jsonl:1, rejected: " in shown
    assert shown.count("<|im_start|>assistant\n⟦yes ") == 1
    assert shown.count("<|im_start|>assistant\n⟦nay ") == 1
    lines = {" ".join(line.split()) for line in shown.splitlines()}
    assert {"pairs 120 of 121 rows", "1 x 'chosen' and 'rejected' are the same"} <= lines
    planned = " ".join(shardwise("plan", "run.yaml", cwd=folder).stdout.split())
    assert "the reference is the model without adapters" in planned
    assert "whole pairs share sequences" in planned


def test_two_ranks_and_accumulation_compute_the_same(
    shardwise: Run, folder: Path, learnt: str
) -> None:
    words = ("cluster=2xCPU", "train.micro_batch=2", "shard.strategy=full_shard")
    stop = ("train.stop_after=2", "name=spread")
    said = shardwise("train", "run.yaml", *words, *stop, cwd=folder).stdout
    # What one process has computed is used by two.
    assert "reference: log-probabilities of 240 answers are read from" in said
    assert len(references(folder)) == 1
    for found, wanted in zip(figures(folder, "spread"), figures(folder, "learnt"), strict=False):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_resumed_run_goes_on_bit_for_bit_whether_the_reference_is_there_or_not(
    shardwise: Run, folder: Path, learnt: str
) -> None:
    """Without adapters, whose first weights are overwritten by the checkpoint."""
    words = ("train", "run.yaml", "adapter={method: none, rank: 16, alpha: 32}", "optim.lr=1e-3")
    few = ("train.steps=4", "checkpoint.at_end=true", "data.eval_fraction=0", "runs_dir=whole")
    run = ("name=whole",)
    shardwise(*words, *few, *run, cwd=folder)
    kept = next((folder / "whole/.cache").glob("reference-*/logps.bin")).read_bytes()
    shardwise(*words, *few, "name=resumed", "train.stop_after=2", cwd=folder)
    for path in (folder / "whole/.cache").glob("reference-*"):
        shutil.rmtree(path)
    said = shardwise(*words, *few, "name=resumed", cwd=folder).stdout
    assert "reference: log-probabilities of 240 answers in " in said
    assert "resumed at step 2" in said
    assert next((folder / "whole/.cache").glob("reference-*/logps.bin")).read_bytes() == kept

    def losses(name: str) -> list[Any]:
        lines = (folder / "whole" / name / "events.jsonl").read_text().splitlines()
        found = [event for event in map(json.loads, lines) if event["event"] == "step"]
        return [(each["step"], each["loss"], each["grad_norm"]) for each in found]

    assert losses("resumed") == losses("whole") and len(losses("whole")) == 4


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("kto", ("data.path=labelled.jsonl", "data.format=labelled")),
        pytest.param("orpo", ("preference.beta=auto",), marks=pytest.mark.long),
        pytest.param(
            "simpo", ("preference.beta=auto", "preference.gamma=0.5"), marks=pytest.mark.long
        ),
    ],
)
def test_every_objective_learns(
    shardwise: Run, folder: Path, learnt: str, objective: str, words: tuple[str, ...]
) -> None:
    run = (f"name={objective}", f"preference.objective={objective}", "train.steps=12", *words)
    before = references(folder)
    shardwise("train", "run.yaml", *run, cwd=folder)
    first, last = (events(folder, objective, "eval")[at] for at in (0, -1))
    assert last["loss"] < first["loss"]
    assert last["preference"]["accuracy"] > max(0.9, first["preference"]["accuracy"] - 0.01)
    assert last["preference"]["margin"] > first["preference"]["margin"]
    assert (last["preference"]["kl"] is not None) == (objective == "kto")
    # Only those that compare with a reference have one.
    assert bool(references(folder) - before) == (objective == "kto")
