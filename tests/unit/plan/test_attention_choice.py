"""The attention that is planned, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.config.plain import config_from_dict
from shardwise.errors import UserError
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.counted import preset_spec
from shardwise.plan import attention_kernel as choice
from shardwise.plan.attention_kernel import choose_attention
from shardwise.plan.decisions import Choice


def chosen(
    name: str, *, cluster: str = "8xH100", dtype: str = "bf16", **fields: Any
) -> Choice[str]:
    sections: dict[str, Any] = {"model": {"name": name}, "data": {"seq_len": 8192}}
    for field, value in fields.items():
        section, _, key = field.partition("__")
        sections.setdefault(section, {})[key] = value
    spec = preset_spec(name)
    config = config_from_dict(sections)
    compiled = bool(config.memory.compile)
    place = parse_cluster(cluster)
    return choose_attention(config, spec, place, param_dtype=dtype, compiled=compiled)


@pytest.fixture(autouse=True)
def _no_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_flash_attention", lambda: False)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_flash_attention", lambda: True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mistral-7b", "a window of 4096 tokens"),
        ("gemma-3-12b", "a window of 1024 tokens"),
        ("gpt-oss-20b", "a window of 128 tokens and sinks"),
        ("olmo-3-7b", "a window of 4096 tokens"),
    ],
)
def test_windows_and_sinks_are_computed_in_tiles(name: str, words: str) -> None:
    made = chosen(name)
    assert made.value == "flex_attention"
    assert words in made.why


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "phi-4", "deepseek-v3"])
def test_a_plain_causal_mask_is_left_to_torch(name: str) -> None:
    assert chosen(name).value == "sdpa"


def test_a_window_that_no_sequence_reaches_is_none() -> None:
    assert chosen("mistral-7b", data__seq_len=4096).value == "sdpa"


def test_on_a_cpu_there_are_no_tiles() -> None:
    assert chosen("mistral-7b", cluster="2xCPU", dtype="fp32").value == "sdpa"
    assert chosen("gpt-oss-20b", cluster="2xCPU", dtype="fp32").value == "eager"


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-12b", "gpt-oss-20b", "deepseek-v3"])
def test_flash_attention_is_chosen_where_it_is_installed(name: str) -> None:
    made = chosen(name)
    assert (made.value, made.source) == ("flash_attention_4", "rule")
    assert "flash-attn-4 is installed" in made.why


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    "fields",
    [{"cluster": "8xA100"}, {"dtype": "fp32"}, {"train__deterministic": True}],
    ids=["older GPU", "fp32", "deterministic"],
)
def test_flash_attention_is_not_chosen_where_it_does_not_run(fields: dict[str, Any]) -> None:
    assert chosen("llama-3.1-8b", **fields).value == "sdpa"


@pytest.mark.usefixtures("flash")
def test_dropout_and_other_masks_stay_with_torch() -> None:
    config = config_from_dict({"model": {"name": "llama-3.1-8b"}})
    plain = preset_spec("llama-3.1-8b")
    drops = replace(plain, attention_dropout=True)
    cluster = parse_cluster("8xH100")
    assert (
        choose_attention(config, drops, cluster, param_dtype="bf16", compiled=True).value == "sdpa"
    )
    gemma = preset_spec("gemma-3-12b")
    work = gemma.kinds[0].work
    chunks = replace(work, attentions=(replace(work.attentions[0], other_mask=True),))
    odd = replace(gemma, kinds=(replace(gemma.kinds[0], work=chunks),))
    assert choose_attention(config, odd, cluster, param_dtype="bf16", compiled=True).value == "sdpa"


def test_the_user_decides() -> None:
    made = chosen("mistral-7b", model__attention="sdpa")
    assert (made.value, made.source) == ("sdpa", "user")


def test_tiles_need_the_compiler() -> None:
    assert chosen("mistral-7b", memory__compile=False).value == "sdpa"
    with pytest.raises(UserError, match=r"flex_attention needs torch\.compile"):
        chosen("mistral-7b", memory__compile=False, model__attention="flex_attention")
