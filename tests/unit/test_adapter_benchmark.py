"""`benchmarks/adapters.py`: its rows, and the table of what they found."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from adapter_rows import ROWS, Row, plan_row, sections_of
from adapters import markdown, rows_of
from shardwise.config.plain import config_from_dict
from shardwise.config.rules import validate_rules


def asked(
    *rows: str, peers: tuple[str, ...] = (), gpu: str = "H200", only_peers: bool = False
) -> list[str]:
    given = argparse.Namespace(rows=list(rows), peers=list(peers), gpu=gpu, only_peers=only_peers)
    return [str(row) for row in rows_of(given)]


def test_rows_are_found_by_pattern_and_by_name() -> None:
    assert asked("*") == list(ROWS)
    assert asked("*70b/lora/*") == ["llama-3.1-70b/lora/1-full@2048"]
    assert asked("mistral-7b/qlora/3-none@1024", peers=("plain", "liger")) == [
        "mistral-7b/qlora/3-none@1024",
        "mistral-7b/qlora/3-none@1024/plain",
        "mistral-7b/qlora/3-none@1024/liger",
    ]
    assert asked("*70b/lora/*", peers=("plain",), only_peers=True) == [
        "llama-3.1-70b/lora/1-full@2048/plain"
    ]
    assert asked("qwen3-30b-a3b/lora/*", gpu="CPU") == ["tiny-mixtral/lora/2-selective@64"]
    with pytest.raises(ValueError, match="no preset"):
        asked("nobody/lora/1-none@64")


@pytest.mark.parametrize("text", [text for text in ROWS if "/lora/" in text])
def test_rows_are_configurations(text: str) -> None:
    validate_rules(config_from_dict(dict(sections_of(Row.parse(text), tiny=False))))


def test_plans_are_of_runs_with_adapters() -> None:
    found = plan_row(Row.parse("tiny-llama/float8/2-none@64"), "H200")
    assert (found.decided.adapter, found.decided.linear) == ("lora", "float8_base")


def test_a_short_model_has_every_kind_of_block() -> None:
    rows = (
        "llama-3.1-70b/qlora/1-0.5@64",
        "llama-3.1-8b/lora/1-full@64",
        "gemma-3-12b/lora/1-0.5@64",
    )
    assert [Row.parse(text).least_layers for text in rows] == [2, 1, 6]


def test_the_table_has_the_plan_beside_the_run_and_ours_beside_peers() -> None:
    row = Row.parse("llama-3.1-8b/lora/2-none@4096")
    ours = {
        **row.names,
        **{"plan_gib": 21.0, "plan_low_gib": 19.0, "plan_high_gib": 22.0, "reserved_gib": 20.0},
        **{"plan_tok_s": 15_000.0, "tok_s": 16_000.0, "mfu": 0.5},
    }
    theirs: dict[str, Any] = {**row.names, "row": f"{row}/plain", "who": "plain", "tok_s": 10_000.0}
    said = markdown({"machine": {"gpu": "H200"}, "rows": [ours, theirs]})
    assert f"| {row} | 21.0 | 20.0 | +5.0% | 15,000 | 16,000 | -6.2% | 50.0% | - |" in said
    assert f"| {row}/plain | - | - | - | - | 10,000 | - | - | 1.60 |" in said
