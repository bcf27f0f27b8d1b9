"""A resume through the real command: what may change under it, and what must not."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.store import list_checkpoints

Run = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.dist

CONFIG = """\
model:
  name: tiny-llama
  overrides: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}
data: {source: jsonl, path: RECORDS, seq_len: 64}
cluster: 1xCPU
train: {steps: 4, global_batch: 8}
observe: {log_every: 1}
"""
TORCHRUN = ("--standalone", "--nproc-per-node", "2")


def write_records(file: Path, verb: str = "make") -> Path:
    records = [json.dumps({"text": f"{n} and {n} {verb} {2 * n}. " * 8}) for n in range(60)]
    file.write_text("\n".join(records) + "\n")
    return file


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("resume")
    records = write_records(home / "records.jsonl")
    (home / "run.yaml").write_text(CONFIG.replace("RECORDS", str(records)))
    return home


@pytest.fixture(scope="module")
def stopped(home: Path, shardwise: Run) -> Path:
    """A run that ended after step 2 of 4."""
    words = (f"runs_dir={home}", "name=stopped", "train.stop_after=2")
    shardwise("train", str(home / "run.yaml"), *words)
    return home / "stopped"


def resume(run_dir: Path, shardwise: Run, *words: str, **how: Any) -> Any:
    place = (f"runs_dir={run_dir.parent}", f"name={run_dir.name}")
    return shardwise("train", str(run_dir.parent / "run.yaml"), *place, *words, **how)


def copy_run(run_dir: Path, name: str) -> Path:
    return Path(shutil.copytree(run_dir, run_dir.with_name(name)))


def events_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def said_of_itself(run_dir: Path) -> list[str]:
    return [(run_dir / name).read_text() for name in ("config.yaml", "plan.json", "events.jsonl")]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("data.seq_len=32", "data.seq_len: 64 -> 32"),
        ("data.shuffle=false", "data.shuffle: true -> false"),
        ("train.seed=1", "train.seed: 0 -> 1"),
        ("train.global_batch=16", "train.global_batch: 8 -> 16"),
        ("model.overrides.num_hidden_layers=3", "num_hidden_layers: 2 -> 3"),
        ("model.overrides.tie_word_embeddings=true", "tie_word_embeddings: false -> true"),
    ],
)
def test_a_change_of_the_order_or_the_model_is_refused_before_ranks_start(
    stopped: Path, shardwise: Run, change: str, shown: str
) -> None:
    before, attempts = said_of_itself(stopped), sorted(stopped.glob("logs/*"))
    done = resume(stopped, shardwise, change, "optim.lr=0.1", expect=2)
    assert shown in done.stderr and "another name" in done.stderr
    assert "optim.lr" not in done.stderr
    assert said_of_itself(stopped) == before
    assert sorted(stopped.glob("logs/*")) == attempts


def test_other_text_is_refused_wherever_it_lies(home: Path, stopped: Path, shardwise: Run) -> None:
    before = said_of_itself(stopped)
    other = write_records(home / "other.jsonl", "give")
    done = resume(stopped, shardwise, f"data.path={other}", "optim.lr=0.1", expect=2)
    assert f"data.path: {home / 'records.jsonl'} -> {other}" in done.stderr
    assert "data.on_change=restart" in done.stderr
    assert said_of_itself(stopped) == before
    # Under the same name too, and all ranks of torchrun end alike.
    write_records(home / "records.jsonl", "give")
    words = ("-m", "shardwise", "train", str(home / "run.yaml"))
    words += (f"runs_dir={home}", "name=stopped", "optim.lr=0.1", "cluster=2xCPU")
    shardwise(*TORCHRUN, *words, module="torch.distributed.run", expect=1)
    write_records(home / "records.jsonl")
    assert said_of_itself(stopped) == before
    newest = max(stopped.glob("logs/attempt-*"), key=lambda path: int(path.name.split("-")[1]))
    for rank in (0, 1):
        assert "no setting changed, but the text did" in (newest / f"rank-{rank}.log").read_text()


def test_the_same_text_elsewhere_goes_on_and_changes_are_shown(
    home: Path, stopped: Path, shardwise: Run
) -> None:
    moved = copy_run(stopped, "moved")
    place = shutil.copy(home / "records.jsonl", home / "elsewhere.jsonl")
    done = resume(moved, shardwise, f"data.path={place}", "optim.lr=1e-3", "cluster=2xCPU")
    for line in (
        "changed since step 2:",
        f"  data.path: {home / 'records.jsonl'} -> {place}",
        "  optim.lr: 0.0003 -> 0.001",
        "  cluster.name: 1xCPU -> 2xCPU",
        "  train.stop_after: 2 -> unset",
    ):
        assert line in done.stdout.splitlines()
    (event,) = events_of(moved, "resume")
    assert event["data"] == "continued" and event["position"] == 2
    assert "optim.lr: 0.0003 -> 0.001" in event["changes"]
    assert json.loads((moved / "plan.json").read_text())["config"]["optim"]["lr"] == 1e-3
    assert "lr: 0.001" in (moved / "config.yaml").read_text()


def test_on_an_explicit_word_the_data_starts_again_and_tokens_add_up(
    stopped: Path, shardwise: Run
) -> None:
    run_dir = copy_run(stopped, "restarted")
    changes = ("data.seq_len=32", "train.global_batch=4", "data.on_change=restart")
    done = resume(run_dir, shardwise, *changes, "train.stop_after=3")
    assert "the data is read from its start, as data.on_change=restart says" in done.stdout
    assert "  data.seq_len: 64 -> 32" in done.stdout
    assert (events_of(run_dir, "resume")[-1])["data"] == "restarted"
    assert list_checkpoints(run_dir / "checkpoints")[-1].manifest.position == 1
    # The next resume finds the new data in its checkpoint, and goes on with it.
    done = resume(run_dir, shardwise, *changes)
    assert events_of(run_dir, "resume")[-1]["data"] == "continued"
    assert events_of(run_dir, "resume")[-1]["position"] == 1
    tokens = [event["tokens"] for event in events_of(run_dir, "step")]
    assert tokens == [512, 1024, 1152, 1280]
    assert "4 of 4 steps, 1.3k tokens, resumed 2 times" in done.stdout
