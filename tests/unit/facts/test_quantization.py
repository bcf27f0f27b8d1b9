"""What config.json says about quantised weights, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import UserError
from shardwise.facts.quantization import Quantization, quant_method, read_quantization


def written(directory: Path, how: Any) -> Path:
    settings = {"model_type": "llama", "quantization_config": how}
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"quant_method": "mxfp4"}, Quantization("mxfp4")),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 64]},
            Quantization("fp8", (128, 64)),
        ),
        ({"quant_method": "fp8", "weight_block_size": None}, Quantization("fp8")),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
            Quantization("mxfp4", unpacked=("model.layers.*.self_attn",)),
        ),
        (None, None),
    ],
)
def test_what_is_dequantised(how: Any, expected: Quantization | None, tmp_path: Path) -> None:
    assert read_quantization(written(tmp_path, how)) == expected


def test_weights_without_a_config_are_plain(tmp_path: Path) -> None:
    assert read_quantization(tmp_path) is None
    assert quant_method({"model_type": "llama"}) is None


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8"]
)
def test_other_methods_are_refused_by_name(method: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        read_quantization(written(tmp_path, {"quant_method": method, "bits": 4}))
    assert f"quantised with {method}" in raised.value.what
    assert raised.value.why and "model.weights_from=DIR" in str(raised.value.fix)


@pytest.mark.parametrize("how", [{"load_in_4bit": True}, "gptq", {}])
def test_a_method_without_a_name_is_refused(how: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a method without a name"):
        read_quantization(written(tmp_path, how))


@pytest.mark.parametrize("names", [3, [3], ["model.[0"]])
def test_odd_names_of_plain_modules_are_refused(names: Any, tmp_path: Path) -> None:
    how = {"quant_method": "mxfp4", "modules_to_not_convert": names}
    with pytest.raises(UserError, match="modules_to_not_convert"):
        read_quantization(written(tmp_path, how))


@pytest.mark.parametrize("block", [128, [128], [0, 128], ["a", 1], [128, 128, 1]])
def test_odd_blocks_are_refused(block: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="weight_block_size") as raised:
        read_quantization(written(tmp_path, {"quant_method": "fp8", "weight_block_size": block}))
    assert "[128, 128]" in str(raised.value.why)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot read .*config\.json"):
        read_quantization(tmp_path)
