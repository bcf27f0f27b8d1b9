"""Files of torch.save as first weights, in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import UserError
from shardwise.model.pretrained import load_pretrained

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
}


def build_model(seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**MIXTRAL, **changes}))


def assert_loads(directory: Path, state: dict[str, Tensor]) -> None:
    model = build_model(seed=1)
    num_bytes = load_pretrained(model, directory)
    assert num_bytes == sum(tensor.nbytes for tensor in state.values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_several_torch_files_are_read(tmp_path: Path) -> None:
    state = build_model(seed=0).state_dict()
    names = {key: f"pytorch_model-{n % 2}.bin" for n, key in enumerate(state)}
    for file in set(names.values()):
        torch.save({key: state[key] for key in state if names[key] == file}, tmp_path / file)
    index = json.dumps({"weight_map": names})
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    assert_loads(tmp_path, state)


def test_experts_are_read_from_one_file_each(tmp_path: Path) -> None:
    model = build_model(seed=0)
    model.save_pretrained(tmp_path)
    assert_loads(tmp_path, model.state_dict())


def test_experts_of_another_width_are_refused(tmp_path: Path) -> None:
    build_model(seed=0, intermediate_size=32).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"experts.* has shape .* the model needs"):
        load_pretrained(build_model(seed=1), tmp_path)


@pytest.mark.parametrize("lost", ["experts.3.", "experts.1.w3", ".w3."])
def test_a_lost_expert_is_told(lost: str, tmp_path: Path) -> None:
    build_model(seed=0).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    rest = {key: value for key, value in load_file(weights).items() if lost not in key}
    save_file(rest, weights)
    with pytest.raises(UserError, match=r"experts.* (has shape|cannot be made)"):
        load_pretrained(build_model(seed=1), tmp_path)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": Trap(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"cannot read .*pytorch_model\.bin") as caught:
        load_pretrained(build_model(seed=0), tmp_path)
    assert "save_pretrained" in caught.value.fix
    assert not (tmp_path / "ran").exists()


def test_what_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="is not a state dict"):
        load_pretrained(build_model(seed=0), tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut"])
def test_a_broken_file_is_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match="cannot read"):
        load_pretrained(build_model(seed=0), tmp_path)


def test_a_file_of_the_old_format_is_told(tmp_path: Path) -> None:
    state = build_model(seed=0).state_dict()
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="cannot read"):
        load_pretrained(build_model(seed=0), tmp_path)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    model = build_model(seed=0)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = file.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match=f"{file.name} is not a whole file of weights"):
            load_pretrained(build_model(seed=1), tmp_path)
