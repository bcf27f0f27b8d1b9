"""Inputs that pass everything before the start and are found wrong by a rank: through the real
command, with a real rank, each ends with one error and a fix, or trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHAPE, build_corpus
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.long, pytest.mark.dist]
SHARDWISE = Path(sys.executable).with_name("shardwise")
RUN = {
    "model": {"name": "model"},
    "data": {"source": "jsonl", "path": "data.jsonl", "seq_len": 32},
    "cluster": "1xCPU",
    "train": {"steps": 2, "global_batch": 4},
    "checkpoint": {"every": 1},
}
# What happens to the files or the settings, and the exit codes that are right.
Change = Callable[[Path, dict[str, Any]], None]
CASES: dict[str, tuple[Change, set[int]]] = {}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("corpus")
    build_corpus(home)
    shutil.rmtree(home / "runs")
    return home


def case(*codes: int) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        CASES[change.__name__.strip("_").replace("_", " ")] = change, set(codes)
        return change

    return add


def change_config(folder: Path, **fields: Any) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE | fields))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def train_once(folder: Path) -> None:
    done = run_train(folder)
    assert done.returncode == 0, done.stderr


def run_train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [str(SHARDWISE), "train", "run.json", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env=kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )


@case(2)
def _unknown_activation(folder: Path, run: dict[str, Any]) -> None:
    change_config(folder, hidden_act="nope")


@case(2)
def _unknown_rope_scaling(folder: Path, run: dict[str, Any]) -> None:
    change_config(folder, rope_scaling={"rope_type": "nope", "factor": 2.0})


@case(2)
def _heads_that_do_not_divide(folder: Path, run: dict[str, Any]) -> None:
    change_config(folder, num_attention_heads=3)


@case(2)
def _norm_of_another_type(folder: Path, run: dict[str, Any]) -> None:
    change_config(folder, rms_norm_eps="small")


@case(2)
def _tensor_missing(folder: Path, run: dict[str, Any]) -> None:
    change_weights(folder, lambda tensors: tensors.__delitem__("model.norm.weight"))


@case(2)
def _tensor_of_another_shape(folder: Path, run: dict[str, Any]) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))


@case(0, 2)
def _tensor_of_whole_numbers(folder: Path, run: dict[str, Any]) -> None:
    ones = torch.ones(16, dtype=torch.int64)
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": ones}))


@case(2)
def _torch_file_of_noise(folder: Path, run: dict[str, Any]) -> None:
    (folder / "model" / "model.safetensors").unlink()
    (folder / "model" / "pytorch_model.bin").write_bytes(os.urandom(1000))


@case(2)
def _torch_file_of_something_else(folder: Path, run: dict[str, Any]) -> None:
    (folder / "model" / "model.safetensors").unlink()
    torch.save([1, 2, 3], folder / "model" / "pytorch_model.bin")


@case(2)
def _distributed_checkpoint_of_noise(folder: Path, run: dict[str, Any]) -> None:
    (folder / "model" / "model.safetensors").unlink()
    (folder / "model" / ".metadata").write_bytes(os.urandom(1000))


@case(2)
def _lines_that_break_later(folder: Path, run: dict[str, Any]) -> None:
    with (folder / "data.jsonl").open("a") as file:
        file.write('{"text": \n' * 20)


@case(2)
def _numbers_of_thousands_of_digits(folder: Path, run: dict[str, Any]) -> None:
    with (folder / "data.jsonl").open("a") as file:
        file.write(('{"text": ' + "9" * 5000 + "}\n") * 20)


@case(2)
def _too_little_text(folder: Path, run: dict[str, Any]) -> None:
    (folder / "data.jsonl").write_text('{"text": "one and one"}\n')


@case(2)
def _text_that_is_no_text(folder: Path, run: dict[str, Any]) -> None:
    (folder / "noise.txt").write_bytes(b"\xff\xfe" * 1000)
    run["data"] = {"source": "text", "path": "noise.txt", "seq_len": 32, "max_corrupt": 0}


@case(2)
def _one_document_to_hold_out_from(folder: Path, run: dict[str, Any]) -> None:
    (folder / "data.jsonl").write_text(json.dumps({"text": "one and one make two " * 50}) + "\n")
    run["data"]["eval_fraction"] = 0.1


@case(2)
def _token_cache_cut(folder: Path, run: dict[str, Any]) -> None:
    train_once(folder)
    file = next((folder / "runs" / ".cache").glob("tokens-*/train.bin"))
    file.write_bytes(file.read_bytes()[:-2])
    run["name"] = "again"


@case(2)
def _token_cache_of_noise(folder: Path, run: dict[str, Any]) -> None:
    train_once(folder)
    next((folder / "runs" / ".cache").glob("tokens-*/index.json")).write_text("[]")
    run["name"] = "again"


@case(0)
def _newest_checkpoint_cut(folder: Path, run: dict[str, Any]) -> None:
    train_once(folder)
    file = folder / "runs" / "run" / "checkpoints" / "step-00000002" / "rank-00000.bin"
    file.write_bytes(file.read_bytes()[:-2])
    run["train"]["steps"] = 3


@case(0)
def _record_of_noise(folder: Path, run: dict[str, Any]) -> None:
    train_once(folder)
    (folder / "runs" / "run" / "events.jsonl").write_bytes(b'[]\n{"event": "step"}\n\xff\n{')
    run["train"]["steps"] = 3


@case(0, 2, 5)
def _plan_of_noise(folder: Path, run: dict[str, Any]) -> None:
    train_once(folder)
    (folder / "runs" / "run" / "plan.json").write_text("{}")


@pytest.mark.parametrize("name", list(CASES))
def test_what_a_rank_finds_ends_with_a_fix(home: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "case"
    shutil.copytree(home, folder)
    run = json.loads(json.dumps(RUN))
    change, codes = CASES[name]
    (folder / "run.json").write_text(json.dumps(run))
    change(folder, run)
    (folder / "run.json").write_text(json.dumps(run))
    done = run_train(folder)
    said = done.stdout + done.stderr
    assert done.returncode in codes, said
    assert "Traceback" not in said
    assert done.returncode == 0 or "fix:" in done.stderr
    assert "starting the ranks again" not in said
