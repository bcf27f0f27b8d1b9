"""Which weights a place holds, and names that wrappers left in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_saves import save_dcp
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import UserError
from shardwise.model.boxes import Box
from shardwise.model.pretrained import load_pretrained
from shardwise.model.stored import find_weights, open_weights, unread_state

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "gpt2": {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
}
Rename = Callable[[str], str]
RENAMES: dict[str, Rename] = {
    "plain": lambda name: name,
    "ddp": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "fsdp1": lambda name: f"_fsdp_wrapped_module.{name}".replace(
        "s.0.", "s.0._fsdp_wrapped_module._checkpoint_wrapped_module."
    ).replace("h.0.", "h.0._fsdp_wrapped_module."),
    "all": lambda name: f"module._orig_mod._fsdp_wrapped_module.{name}",
}


def build(family: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPES[family]))


def assert_loads(place: Path, family: str, state: dict[str, Tensor]) -> None:
    model = build(family, seed=1)
    load_pretrained(model, place)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES.keys())
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("layout", ["full", "sharded", "dcp"])
def test_every_layout_loads_under_every_name(
    layout: str, family: str, rename: Rename, tmp_path: Path
) -> None:
    state = build(family, seed=0).state_dict()
    renamed = {rename(name): tensor for name, tensor in state.items()}
    if layout == "full":
        torch.save(renamed, tmp_path / "pytorch_model_fsdp.bin")
    elif layout == "sharded":
        save_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": renamed})
    else:
        save_dcp(tmp_path, renamed)
    assert_loads(tmp_path, family, state)


def test_the_safest_format_comes_first(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2)}
    save_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": state})
    assert find_weights(tmp_path) == tmp_path / "pytorch_model_fsdp_0/.metadata"
    for name in ("pytorch_model_fsdp.bin", "pytorch_model.bin"):
        torch.save(state, tmp_path / name)
        assert find_weights(tmp_path) == tmp_path / name
    save_file(state, tmp_path / "model.safetensors")
    assert find_weights(tmp_path) == tmp_path / "model.safetensors"


@pytest.mark.parametrize("name", ["final.safetensors", "final.bin", "consolidated.pt"])
def test_one_file_of_any_name_is_read(name: str, tmp_path: Path) -> None:
    state = {"weight": torch.arange(6.0).view(3, 2), "scale": torch.tensor(2.0)}
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    weights = open_weights(path)
    assert torch.equal(weights.read("weight", Box((1, 0), (2, 2))), state["weight"][1:3])
    assert torch.equal(weights.read("weight", Box((0, 1), (3, 1))), state["weight"][:, 1:])
    assert weights.read("weight", Box((3, 0), (0, 2))).shape == (0, 2)
    assert torch.equal(weights.read("scale", Box((), ())), state["scale"])


def test_other_state_is_told(tmp_path: Path) -> None:
    place = save_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": {"weight": torch.ones(2)}})
    assert unread_state(tmp_path) == []
    (tmp_path / "optimizer_0").mkdir()
    (tmp_path / "scheduler.bin").touch()
    assert unread_state(tmp_path) == unread_state(place) == ["optimizer_0", "scheduler.bin"]


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"weight_map": {"weight": "../other.bin"}}), "is not an index of weights"),
        (json.dumps({"weight_map": {"weight": "/etc/passwd"}}), "is not an index of weights"),
        (json.dumps({"weight_map": {"weight": 7}}), "is not an index of weights"),
        (json.dumps({"weight_map": ["weight"]}), "is not an index of weights"),
        (json.dumps({}), "is not an index of weights"),
        ("{", "is not an index of weights"),
        (json.dumps({"weight_map": {"weight": "part-2.bin"}}), "names 1 files that are not beside"),
    ],
)
def test_an_index_that_lies_is_refused(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        open_weights(tmp_path)
