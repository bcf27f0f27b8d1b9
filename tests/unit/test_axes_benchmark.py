"""The rows of `benchmarks/axes.py`, its real ranks' cases, and the table of what they found."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from axes import compare, markdown, rows_of
from axes_ranks import Case, cases_of
from axes_rows import ROWS, Row, measure_row, plan_row, said_of


def asked(*patterns: str, gpu: str = "H200") -> list[Row]:
    return rows_of(argparse.Namespace(rows=list(patterns), gpu=gpu))


def test_rows_keep_the_order_of_their_worth() -> None:
    assert [str(row) for row in asked("*")] == list(ROWS)
    long, stand_in = asked("llama-3.1-8b/*")
    assert stand_in.stands_in and stand_in.usual == long
    assert [str(row) for row in asked("*70b*", gpu="CPU")] == [
        "tiny-llama/2x4/replicate2-shard2-tensor2@128"
    ]


@pytest.mark.parametrize("name", ROWS)
def test_rows_can_be_planned(name: str) -> None:
    row = ROWS[name]
    said = said_of(plan_row(row, "H200"))
    assert said["plan_gib"] < 141
    assert {axis: said["picked"][axis] for axis, _ in row.axes} == dict(row.axes)


def test_a_row_is_measured_over_free_and_modelled_links() -> None:
    (row,) = asked("llama-3.1-8b/8/context8@131072", gpu="CPU")
    found = measure_row(plan_row(row, "CPU"), "cpu", 1, modelled=True)
    assert found["tok_s"] == pytest.approx(1e3 * row.seq_len / 8 / found["step_ms"])
    assert found["modelled_ms"] > 0 and found["emulated_ms"] > 0


def test_every_case_has_one_process_to_be_compared_with() -> None:
    for compiled in (False, True):
        cases = cases_of(compiled=compiled)
        assert {case.reference for case in cases} <= set(cases)
        assert {case.axis for case in cases} == {"rank", "tensor", "context", "expert"}
    two = Case("llama", "fp32", "tensor", 2)
    found: dict[str, dict[str, Any]] = {
        str(two): {"losses": [2.0, 1.0]},
        str(two.reference): {"losses": [2.0, 1.1]},
    }
    compare(found)
    assert found[str(two)]["off"] == pytest.approx(1 / 11)
    assert "off" not in found[str(two.reference)]


def test_the_table_has_both_links_and_what_the_planner_took() -> None:
    names = {name: asked("*")[0].names[name] for name in ("row", "mesh")}
    figures = {
        **{"plan_gib": 84.0, "reserved_gib": 80.0, "plan_linked_tok_s": 3000.0, "tok_s": 3100.0},
        **{"free_tok_s": 3200.0, "mfu": 0.46, "free_mfu": 0.475, "modelled_ms": 70.0},
        **{"exposed_ms": 60.0, "picked": {"recompute": "none", "micro_batch": 1}},
    }
    planned = {"row": "m/8/planned@64", "mesh": {}, "picked": {"shard": 8, "expert": 1}}
    said = markdown({"machine": {"gpu": "H200"}, "rows": [{**names, **figures}, planned]})
    line = "| none, 1 | 84.0 | 80.0 | +5.0% | 3,000 | 3,100 | 3,200 | 46.0% | 47.5% | 70.0 | 60.0 |"
    assert line in said
    assert "| m/8/planned@64: shard 8 |" in said
