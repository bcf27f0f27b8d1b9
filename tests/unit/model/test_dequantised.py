"""Quantised files read as plain tensors: their values, and no more of the files than needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quantised_models import (
    FP8,
    MXFP4,
    SHAPES,
    pack_fp8,
    pack_mxfp4,
    save_both,
    unpack_by_hand,
    unpack_fp8,
)
from shardwise.errors import UserError
from shardwise.kernels.mxfp4 import unpack as unpack_mxfp4
from shardwise.model import stored
from shardwise.model.boxes import Box, whole_box
from shardwise.model.dequantised import open_dequantised
from shardwise.model.pretrained import load_pretrained

STACK = "experts.down_proj"
LINEAR = "mlp.up_proj.weight"
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
Read = list[tuple[str, Box]]


def save(directory: Path, tensors: dict[str, Tensor], how: dict[str, Any] | None) -> Path:
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": how}))
    return directory


def save_stack(directory: Path) -> Tensor:
    """3 experts of 96 columns (3 groups) and 10 rows."""
    blocks, scales = pack_mxfp4(torch.randn(3, 96, 10))
    tensors = {f"{STACK}_blocks": blocks, f"{STACK}_scales": scales, "norm": torch.ones(3)}
    save(directory, tensors, MXFP4)
    return unpack_by_hand(blocks, scales)


def save_linear(directory: Path, how: dict[str, Any] = BLOCKS) -> Tensor:
    values, scales = pack_fp8(torch.randn(300, 200))
    tensors = {LINEAR: values, f"{LINEAR}_scale_inv": scales, "norm": torch.ones(3)}
    save(directory, tensors, how)
    return unpack_fp8(values, scales)


@pytest.fixture
def parts_read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Every part of a file that is read."""
    found: Read = []
    read = stored._Safetensors.read

    def recorded(self: Any, key: str, box: Box) -> Tensor:
        found.append((key, box))
        return read(self, key, box)

    monkeypatch.setattr(stored._Safetensors, "read", recorded)
    return found


def test_values_are_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (4, 16, 3, 16), dtype=torch.uint8)
    scales = torch.randint(64, 190, (4, 16, 3), dtype=torch.uint8)
    expected = module.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(unpack_mxfp4(blocks, scales).transpose(1, 2).float(), expected)


def test_every_byte_and_every_scale_is_exact() -> None:
    """All bytes with all scales whose products fp32 holds."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 253, 16, 16)
    scales = torch.arange(253, dtype=torch.uint8).view(1, 253, 1).expand(1, 253, 16)
    found = unpack_mxfp4(blocks, scales).transpose(1, 2)
    assert torch.equal(found.double(), unpack_by_hand(blocks, scales).double())
    damaged = unpack_mxfp4(blocks[:, :1], torch.full((1, 1, 16), 255, dtype=torch.uint8))
    assert damaged.isnan().all()


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0, 0), (3, 96, 10)),
        Box((1, 0, 0), (1, 96, 10)),
        Box((0, 40, 3), (2, 30, 4)),
        Box((2, 64, 9), (1, 32, 1)),
        Box((3, 0, 0), (0, 96, 10)),
        Box((0, 96, 0), (3, 0, 10)),
    ],
)
def test_a_part_of_a_stack_is_read_alone(box: Box, tmp_path: Path, parts_read: Read) -> None:
    whole = save_stack(tmp_path)
    files = open_dequantised(tmp_path)
    assert set(files.keys()) == {STACK, "norm"}
    assert files.shape(STACK) == [3, 96, 10]
    assert torch.equal(files.read(STACK, box).float(), whole[box.slices])
    groups = len({column // 32 for column in range(96)[box.slices[1]]})
    expected = box.sizes[0] * box.sizes[2] * groups
    for ending, each in (("_blocks", 16), ("_scales", 1)):
        elements = [part.num_elements for key, part in parts_read if key == STACK + ending]
        assert sum(elements) == expected * each


@pytest.mark.parametrize(
    ("box", "num_scales"),
    [
        (Box((0, 0), (300, 200)), 6),
        (Box((150, 0), (150, 200)), 4),
        (Box((120, 130), (20, 10)), 2),
        (Box((299, 199), (1, 1)), 1),
        (Box((300, 0), (0, 200)), 0),
    ],
)
def test_a_part_of_a_linear_is_read_alone(
    box: Box, num_scales: int, tmp_path: Path, parts_read: Read
) -> None:
    whole = save_linear(tmp_path)
    files = open_dequantised(tmp_path)
    assert set(files.keys()) == {LINEAR, "norm"}
    assert files.shape(LINEAR) == [300, 200]
    assert torch.equal(files.read(LINEAR, box), whole[box.slices])
    elements = {key: part.num_elements for key, part in parts_read}
    assert elements[LINEAR] == box.num_elements
    assert elements.get(f"{LINEAR}_scale_inv", 0) == num_scales


def test_stacked_experts_have_blocks_too(tmp_path: Path) -> None:
    packed = [pack_fp8(torch.randn(140, 130)) for _ in range(3)]
    values = torch.stack([each[0].view(torch.uint8) for each in packed]).view(torch.float8_e4m3fn)
    scales = torch.stack([each[1] for each in packed])
    save(tmp_path, {STACK: values, f"{STACK}_scale_inv": scales}, BLOCKS)
    found = open_dequantised(tmp_path).read(STACK, Box((1, 100, 0), (2, 40, 130)))
    expected = torch.stack([unpack_fp8(*each) for each in packed])[1:, 100:]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_may_have_one_scale(ending: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.randn(6, 4).to(torch.float8_e4m3fn)
    tensors = {LINEAR: values, LINEAR + ending: torch.full(shape, 0.25)}
    tensors["mlp.up_proj.input_scale"] = torch.ones(())
    files = open_dequantised(save(tmp_path, tensors, FP8))
    assert set(files.keys()) == {LINEAR}
    assert torch.equal(files.read(LINEAR, Box((2, 0), (3, 4))), values[2:5].float() / 4)


def test_a_config_that_says_quantised_may_hold_plain_weights(tmp_path: Path) -> None:
    """As transformers saves a model that it has dequantised."""
    plain = torch.randn(2, 3)
    for how in (MXFP4, BLOCKS):
        files = open_dequantised(save(tmp_path, {"a.weight": plain}, how))
        assert torch.equal(files.read("a.weight", whole_box((2, 3))), plain)


@pytest.mark.parametrize("family", SHAPES)
def test_a_published_directory_loads_as_its_plain_twin(family: str, tmp_path: Path) -> None:
    save_both(family, tmp_path / "quantised", tmp_path / "plain")
    states = []
    for kind in ("quantised", "plain"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[family]))
        load_pretrained(model, tmp_path / kind)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def shortened(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][..., :-1].contiguous()

    return change


MX: dict[str, Tensor] = dict(
    zip((f"{STACK}_blocks", f"{STACK}_scales"), pack_mxfp4(torch.ones(2, 64, 4)), strict=True)
)
EIGHT: dict[str, Tensor] = dict(
    zip((LINEAR, f"{LINEAR}_scale_inv"), pack_fp8(torch.ones(130, 150)), strict=True)
)


@pytest.mark.parametrize(
    ("tensors", "how", "change", "named", "text"),
    [
        (MX, MXFP4, lambda t: t.pop(f"{STACK}_scales"), STACK, f"no {STACK}_scales"),
        (MX, MXFP4, lambda t: t.pop(f"{STACK}_blocks"), STACK, f"no {STACK}_blocks"),
        (MX, MXFP4, shortened(f"{STACK}_scales"), STACK, "must be [2, 4, 2]"),
        (MX, MXFP4, shortened(f"{STACK}_blocks"), STACK, "groups, 16"),
        (MX, MXFP4, lambda t: t.update({k: v.int() for k, v in t.items()}), STACK, "int32"),
        (EIGHT, BLOCKS, lambda t: t.pop(f"{LINEAR}_scale_inv"), LINEAR, f"no {LINEAR}_scale_inv"),
        (EIGHT, BLOCKS, shortened(f"{LINEAR}_scale_inv"), LINEAR, "must be [2, 2]"),
        (EIGHT, FP8, lambda t: None, LINEAR, "one number"),
        (EIGHT, None, lambda t: None, LINEAR, "quant_method fp8"),
        (EIGHT, BLOCKS, lambda t: t.update({LINEAR: t[LINEAR].float()}), LINEAR, "float32"),
    ],
)
def test_damage_is_an_error_that_names_it(
    tensors: dict[str, Tensor],
    how: dict[str, Any] | None,
    change: Callable[[dict[str, Tensor]], object],
    named: str,
    text: str,
    tmp_path: Path,
) -> None:
    left = dict(tensors)
    change(left)
    save(tmp_path, left, how)
    with pytest.raises(UserError) as raised:
        files = open_dequantised(tmp_path)
        files.read(named, whole_box(files.shape(named)))
    assert named in raised.value.what
    assert text in str(raised.value)
    assert raised.value.why and raised.value.fix


def test_whole_numbers_never_become_weights(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    weights = {"weight": torch.ones(2, 3, dtype=torch.int8), "bias": torch.ones(2)}
    with pytest.raises(UserError, match="weight is stored as int8, the model needs floats"):
        load_pretrained(model, save(tmp_path, weights, None))
