"""Which format frozen weights have, by what a model is published in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.config.schema import AdapterConfig, MeshConfig, ModelConfig, RunConfig
from shardwise.errors import UserError
from shardwise.facts.config_source import read_model_config
from shardwise.facts.quantization import Quantization
from shardwise.plan.frozen_base import choose_format, shipped_by

MXFP4 = Quantization("mxfp4")
FP8 = Quantization("fp8", (128, 128))


def config(base: Any, tensor: int = 1) -> RunConfig:
    adapter = AdapterConfig(method="lora", base=base)
    return RunConfig(adapter=adapter, mesh=MeshConfig(tensor=tensor))


@pytest.mark.parametrize(
    ("preset", "method", "block"),
    [
        ("gpt-oss-20b", "mxfp4", None),
        ("gpt-oss-120b", "mxfp4", None),
        ("deepseek-v3", "fp8", (128, 128)),
        ("llama-3.1-8b", None, None),
    ],
)
def test_presets_have_the_format_that_they_are_published_in(
    preset: str, method: str | None, block: tuple[int, int] | None
) -> None:
    model = ModelConfig(name=preset)
    found = shipped_by(RunConfig(model=model), read_model_config(model))
    assert (found.method, found.block) == (method, block) if found else method is None
    format_, why = choose_format(replace(config("auto"), model=model), found)
    assert format_ == (method or "param")
    assert why


@pytest.mark.parametrize(
    ("run", "shipped", "expected", "why"),
    [
        (config("auto"), MXFP4, "mxfp4", "published in MXFP4"),
        (config("auto"), FP8, "fp8", "published in fp8 blocks"),
        (config("auto"), Quantization("fp8"), "fp8", "published in fp8 blocks"),
        (config("auto"), Quantization("fp8", (1, 256)), "fp8", "published in fp8 blocks"),
        (config("auto"), Quantization("fp8", (128, 64)), "param", "a scale is for 64 columns"),
        (config("auto", tensor=2), FP8, "param", "mesh.tensor divides weights"),
        (config("auto"), None, "param", "not published packed"),
        (config("mxfp4"), MXFP4, "mxfp4", ""),
        (config("nf4"), MXFP4, "nf4", ""),
        (config("param"), FP8, "param", ""),
    ],
)
def test_the_format_and_why(
    run: RunConfig, shipped: Quantization | None, expected: str, why: str
) -> None:
    found, reason = choose_format(run, shipped)
    assert found == expected
    assert why in reason


@pytest.mark.parametrize(
    ("base", "shipped", "why"),
    [
        ("mxfp4", None, "have plain weights"),
        ("mxfp4", FP8, "have fp8 blocks"),
        ("fp8", MXFP4, "have MXFP4"),
        ("fp8", Quantization("fp8", (128, 64)), "a scale is for 64 columns"),
    ],
)
def test_a_format_that_files_do_not_have_is_refused(
    base: str, shipped: Quantization | None, why: str
) -> None:
    with pytest.raises(UserError) as raised:
        choose_format(config(base), shipped)
    assert why in str(raised.value.why)
    assert "adapter.base=nf4" in str(raised.value.fix)
