"""What is fetched of a hub model before ranks start."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from shardwise.config.schema import ModelConfig, RunConfig
from shardwise.facts.presets import PRESETS
from shardwise.launch.prepare import fetch_weights

COMMON = ["config.json", "tokenizer.json", "training_args.bin", "README.md"]
OLD = ["pytorch_model-1-of-2.bin", "pytorch_model-2-of-2.bin", "pytorch_model.bin.index.json"]


class Hub:
    """A repository of these files, and the snapshot directory of those that were fetched."""

    def __init__(self, snapshot: Path, files: list[str]) -> None:
        self.snapshot = snapshot
        self.files = files

    def download(self, repo: str, file: str, revision: str | None) -> str:
        (self.snapshot / file).write_text(json.dumps(PRESETS["tiny-qwen"]))
        return str(self.snapshot / file)

    def download_all(
        self,
        repo: str,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
    ) -> str:
        for file in self.files:
            if any(fnmatch(file, pattern) for pattern in ignore_patterns):
                continue
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (self.snapshot / file).touch()
        return str(self.snapshot)

    def fetched(self) -> set[str]:
        return {path.name for path in self.snapshot.iterdir()}


def fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], **model: str
) -> set[str]:
    hub = Hub(tmp_path, COMMON + files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.download_all)
    fetch_weights(RunConfig(model=ModelConfig(name="org/model", **model)))  # type: ignore[arg-type]
    return hub.fetched()


def test_safetensors_are_fetched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_folder = "original/model.safetensors"  # gpt-oss has both
    found = fetch(tmp_path, monkeypatch, ["model.safetensors", in_folder, *OLD])
    assert found == {"config.json", "tokenizer.json", "model.safetensors", OLD[-1]}


def test_the_older_form_is_fetched_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch(tmp_path, monkeypatch, OLD) == {"config.json", "tokenizer.json", *OLD}


@pytest.mark.parametrize(
    ("index", "files"),
    [
        ("model.safetensors.index.json", ["model-1.safetensors", "model-2.safetensors"]),
        ("pytorch_model.bin.index.json", ["pytorch_model-1.bin", "pytorch_model-2.bin"]),
    ],
)
def test_a_cut_download_goes_on(
    index: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_map = {f"layer{n}": file for n, file in enumerate(files)}
    (tmp_path / index).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / files[0]).touch()
    assert fetch(tmp_path, monkeypatch, files) >= {*files, "tokenizer.json"}


def test_what_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    assert fetch(tmp_path, monkeypatch, ["model.safetensors"]) == {
        *("config.json", "model.safetensors")
    }


@pytest.mark.parametrize("how", ["random", "elsewhere"])
def test_weights_that_no_one_reads_are_not_fetched(
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    elsewhere = tmp_path_factory.mktemp("weights")
    (elsewhere / "model.safetensors").touch()
    model = {"weights": "random"} if how == "random" else {"weights_from": str(elsewhere)}
    assert fetch(tmp_path, monkeypatch, OLD, **model) == {"config.json"}
