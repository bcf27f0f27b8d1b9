from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.model.weight_fingerprint import fingerprint_weights


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(40, 30) for name in ("a.weight", "b.weight", "c.weight")}


def save(folder: Path, values: dict[str, torch.Tensor], *, files: int = 1) -> Path:
    folder.mkdir()
    if files == 1:
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"model-{n}.safetensors" for n in range(files)]
    where = {key: names[n % files] for n, key in enumerate(values)}
    for name in names:
        save_file({key: values[key] for key in values if where[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_copies_are_the_same_in_any_files(tmp_path: Path) -> None:
    whole = fingerprint_weights(save(tmp_path / "whole", tensors()))
    assert fingerprint_weights(save(tmp_path / "copy", tensors())) == whole
    assert fingerprint_weights(save(tmp_path / "split", tensors(), files=2)) == whole
    assert fingerprint_weights(tmp_path / "copy" / "model.safetensors") == whole


@pytest.mark.parametrize("name", ["a.weight", "c.weight"])
def test_other_values_of_one_tensor_are_told(name: str, tmp_path: Path) -> None:
    whole = fingerprint_weights(save(tmp_path / "whole", tensors()))
    changed = tensors()
    changed[name][0, 3] += 1e-3
    assert fingerprint_weights(save(tmp_path / "changed", changed)) != whole


def test_names_dtypes_and_shapes_are_told(tmp_path: Path) -> None:
    zeros = {"a": torch.zeros(4, 4)}
    found = {
        fingerprint_weights(save(tmp_path / "plain", zeros)),
        fingerprint_weights(save(tmp_path / "named", {"b": zeros["a"]})),
        fingerprint_weights(save(tmp_path / "shaped", {"a": torch.zeros(2, 8)})),
        fingerprint_weights(save(tmp_path / "typed", {"a": torch.zeros(4, 4, dtype=torch.int32)})),
    }
    assert len(found) == 4


def test_files_of_torch_are_told_by_samples(tmp_path: Path) -> None:
    for seed, folder in ((0, "a"), (0, "b"), (1, "c")):
        (tmp_path / folder).mkdir()
        torch.save(tensors(seed), tmp_path / folder / "pytorch_model.bin")
    first, same, other = (fingerprint_weights(tmp_path / name) for name in "abc")
    assert first == same != other


@pytest.mark.parametrize(
    "content", [b"", b"x" * 7, b"\xff" * 64, (9).to_bytes(8, "little") + b"[1, 2, 3]"]
)
def test_a_damaged_file_is_left_to_who_reads_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert fingerprint_weights(tmp_path)
