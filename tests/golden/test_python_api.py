"""The package's own names, as a script or notebook would use them."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardwise
from commands import rank_environment, run_forked

SCRIPT = """
import os, shardwise
from shardwise.errors import ExitCode, UserError
from shardwise.metrics.events import read_events

config = shardwise.load_config("run.yaml", ["cluster.peak_tflops=1000", "gates.min_mfu=0.9"])
plan = shardwise.choose_plan(config)
assert plan.decided.global_batch == 2
environment = dict(os.environ)
try:
    shardwise.train(config)
except UserError as error:
    failure = error
assert "did not pass: " in str(failure) and "mfu" in str(failure), failure
assert failure.code == ExitCode.VERIFY_FAILED
assert dict(os.environ) == environment
*_, end, verdict = read_events(plan.run_dir / "events.jsonl")
assert end["finished"] is True
assert {gate["name"]: gate["verdict"] for gate in verdict["gates"]}["mfu"] == "fail"
print("as it should")
"""


def test_train_from_python(tmp_path: Path) -> None:
    """Through to the end, and an error then, since a gate fails that must not."""
    text = "model: tiny-llama\ndata: {source: synthetic, seq_len: 16}\ncluster: 1xCPU\n"
    text += "train: {steps: 3, global_batch: 2}\ngates: {enforce: true}\n"
    (tmp_path / "run.yaml").write_text(text)
    assert run_as("script", SCRIPT, tmp_path).stdout.endswith("as it should\n")


def test_the_page_about_python_runs_as_it_stands(tmp_path: Path) -> None:
    text = "model: tiny-llama\ndata: {source: synthetic, seq_len: 16}\ncluster: 1xCPU\n"
    text += "train: {steps: 4, global_batch: 2}\nobserve: {log_every: 1}\n"
    (tmp_path / "run.yaml").write_text(text)
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    # The last one is for ranks that torchrun starts; tests/dist/own_loop.py runs it.
    *blocks, own_loop = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert "parallelize(model, plan)" in own_loop
    shown = run_as("page", "\n".join(blocks), tmp_path).stdout.splitlines()
    assert "runs/run" in shown and "full_shard 8" in shown
    # What the page says of the error.
    promised = re.findall(r"^    print\(.*\)  # (.+)$", page, re.MULTILINE)
    assert len(promised) == 3 and shown[-3:] == promised
    assert [name for name in shardwise.__all__ if name not in page] == []


def run_as(module: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A file of a user's, called in its folder."""
    (folder / f"{module}.py").write_text(code)
    environ = rank_environment() | {"PYTHONPATH": str(folder)}
    return run_forked(folder, module=module, cwd=folder, environ=environ)


NOTEBOOK = """
import contextlib, io, shardwise
from shardwise.errors import UserError

cell = io.StringIO()
with contextlib.redirect_stdout(cell):
    run_dir = shardwise.train("run.yaml", "data.seq_len=16", "train.steps=2", "name=first")
    try:
        shardwise.train("run.yaml", "data.field=body", "name=second")
    except UserError as error:
        failure = error
open("cell.txt", "w").write(cell.getvalue())
open("error.txt", "w").write(str(failure))
assert str(run_dir) == "runs/first"
"""


def test_a_notebook_trains_on_a_file_and_shows_what_the_ranks_print(tmp_path: Path) -> None:
    """With `sys.stdout` replaced, as a kernel does; nothing goes to the process's own output."""
    texts = [f"{n} and {n} make {2 * n}" for n in range(400)]
    pq.write_table(pa.table({"text": texts, "id": range(400)}), tmp_path / "records.parquet")
    text = "model: tiny-llama\ndata: records.parquet\ncluster: 1xCPU\n"
    text += "train: {steps: 3, global_batch: 2}\nobserve: {log_every: 1}\n"
    (tmp_path / "run.yaml").write_text(text)
    assert run_as("notebook", NOTEBOOK, tmp_path).stdout == ""
    cell = (tmp_path / "cell.txt").read_text()
    assert "step 1/2" in cell and "step 2/2" in cell and "finished 2 steps" in cell
    error = (tmp_path / "error.txt").read_text()
    assert "records.parquet has no column 'body'" in error
    assert "its columns are text, id" in error


def test_the_signature_of_choose_plan_keeps_the_environment_to_itself() -> None:
    assert "PATH" not in str(inspect.signature(shardwise.choose_plan))


def test_overrides_need_a_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="load_config"):
        shardwise.train(shardwise.load_config(None), "train.steps=2")
