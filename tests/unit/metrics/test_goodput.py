"""Seconds of a run by what they went to."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.metrics.goodput import goodput, productive_share


def step(time: float, number: int, step_s: float = 1.0, data: float = 0.0) -> dict[str, Any]:
    return {"event": "step", "time": time, "step": number, "step_s": step_s, "data_share": data}


def start(time: float, number: int = 0) -> list[dict[str, Any]]:
    return [{"event": "data", "time": time}, {"event": "start", "time": time, "step": number}]


def test_a_quiet_run_is_productive() -> None:
    events = [*start(0.0), *(step(float(n), n) for n in range(1, 11))]
    spent = goodput(events)
    assert spent["productive"] == pytest.approx(10.0)
    assert productive_share(spent) == pytest.approx(1.0)


def test_a_slow_first_step_is_compilation() -> None:
    events = [*start(0.0), step(8.0, 1, 8.0), step(9.0, 2), step(10.0, 3)]
    spent = goodput(events)
    assert spent["compile"] == pytest.approx(7.0)
    assert spent["productive"] == pytest.approx(3.0)


def test_waiting_for_data_and_for_saves_is_not_productive() -> None:
    save = {"event": "checkpoint", "time": 5.5, "stage_s": 0.5}
    events = [*start(0.0), step(1.0, 1), step(5.0, 5, 1.0, 0.25), save]
    spent = goodput(events)
    assert spent["data"] == pytest.approx(1.0)
    assert spent["checkpoint"] == pytest.approx(0.5)
    assert sum(spent.values()) == pytest.approx(5.5)


def test_steps_that_a_restart_repeats_are_recompute() -> None:
    first = [*start(0.0), step(1.0, 1), *(step(float(n), n) for n in range(2, 8))]
    # Killed after step 7; saved at step 4; 10 s later it goes on there.
    events = [*first, *start(17.0, 4), *(step(13.0 + n, n) for n in range(5, 11))]
    spent = goodput(events)
    assert spent["recompute"] == pytest.approx(3.0)
    assert spent["productive"] == pytest.approx(10.0)
    assert spent["idle"] == pytest.approx(10.0)


@pytest.mark.parametrize(("last", "idle"), [("end", 0.0), ("stopped", 0.0), ("restart", 100.0)])
def test_time_between_commands_is_not_counted_but_that_after_a_failure_is(
    last: str, idle: float
) -> None:
    first = [*start(0.0), *(step(float(n), n) for n in range(1, 5)), {"event": last, "time": 4.0}]
    events = [*first, *start(104.0, 4), *(step(100.0 + n, n) for n in range(5, 9))]
    spent = goodput(events)
    assert spent["idle"] == pytest.approx(idle)
    assert spent["productive"] == pytest.approx(8.0)


def test_starts_of_one_step_each_have_nothing_usual_to_compare_with() -> None:
    events = [*start(0.0), step(3.0, 1, 3.0), *start(10.0, 1), step(13.0, 2, 3.0)]
    spent = goodput(events)
    assert spent["compile"] == 0.0 and spent["productive"] == pytest.approx(6.0)


def test_an_empty_record_has_no_time() -> None:
    assert sum(goodput([]).values()) == 0.0
    assert productive_share(goodput([])) == 0.0
