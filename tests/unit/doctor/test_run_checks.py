"""Each check of a run fires on its fault; made-slow runs get the right cause; others are quiet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from healthy import healthy_plans
from known_lines import HEALTHY, KNOWN_LINES

import slow_runs
from shardwise.checkpoint.store import Entry
from shardwise.doctor.check import find_faults
from shardwise.doctor.examine import diagnose
from shardwise.doctor.registry import RUN_CHECKS
from shardwise.doctor.run.case import Case
from shardwise.doctor.signatures.log import LogText
from shardwise.doctor.slow.ranked import SLOW, rank_causes

PLAN = slow_runs.plan_of("model=llama-3.1-8b", "cluster=2x8xH100")
CHANNEL = "gpu-a:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via {}\n"


def healthy() -> Case:
    case = slow_runs.healthy_run(PLAN, 0)
    return replace(case, logs=(LogText("rank-0.log", HEALTHY),))


def with_steps(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Case:
    case = healthy()
    events = [change(e) if e["event"] == "step" else e for e in case.run.events]
    return replace(case, run=replace(case.run, events=tuple(events)))


def with_event(event: str, **fields: Any) -> Case:
    case = healthy()
    more = {"event": event, "time": slow_runs.BEGAN + 900, **fields}
    return replace(case, run=replace(case.run, events=(*case.run.events[:-1], more)))


def with_log(text: str) -> Case:
    return replace(healthy(), logs=(LogText("attempt-1/rank-3.log", f"{HEALTHY}{text}\n"),))


def at(step: int, **changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda event: {**event, **changes} if event["step"] == step else event


def never_stepped() -> Case:
    case = with_log(KNOWN_LINES["SW530"])
    return replace(case, run=replace(case.run, events=case.run.events[:2]))


def damaged() -> Case:
    bad = Entry(Path("step-00000060"), 60, "damaged", None, "rank-00001.bin is cut")
    return replace(healthy(), run=replace(healthy().run, checkpoints=(bad,)))


def cut_off() -> Case:
    """A run that is at work."""
    case = healthy()
    return replace(case, run=replace(case.run, events=case.run.events[:-1]))


GIB = 2**30
FAULTS: dict[str, Callable[[], Case]] = {
    "SW301": damaged,
    "SW302": lambda: replace(healthy(), run=replace(healthy().run, notes=("no plan.json",))),
    "SW303": lambda: with_event("restart", reason="rank 3 failed: killed by signal SIGKILL"),
    "SW304": never_stepped,
    "SW305": lambda: with_steps(lambda event: {**event, "grad_norm": 0.0}),
    "SW306": lambda: with_event("loss_scale", step=600, scale=0.25, overflows=1),
    "SW307": lambda: with_steps(at(300, grad_norm=40.0)),
    "SW308": lambda: with_event("checkpoint", step=600, stage_s=1.0, write_s=900.0),
    "SW309": lambda: with_steps(at(300, grad_norm=0.0)),
    "SW310": lambda: with_steps(at(300, loss=float("nan"))),
    "SW311": lambda: with_steps(
        lambda event: {**event, "memory": {"allocated": GIB, "reserved": 84 * GIB}}
    ),
    "SW312": lambda: with_steps(
        lambda event: {**event, "memory": {"allocated": 79 * GIB, "reserved": 79 * GIB}}
    ),
    "SW313": lambda: with_event("nonfinite", step=7, batch=7, sequences=[0, 8], in_a_row=1),
    "SW314": lambda: with_event("rollback", step=500, position=510),
    "SW315": lambda: with_event("checkpoint_failed", step=500, stage_s=1.0, error="disk full"),
    "SW316": lambda: with_event("data", tokens=1, tokenizer="byte", skipped=["a.jsonl:3"]),
    "SW317": lambda: with_event("sink_failed", sink="wandb", reason="no network"),
    "SW318": lambda: with_log("replicas differ after step 40: rank 3 on gpu-b holds other bits"),
    "SW319": lambda: with_log("the ranks were not started alike:\n  rank 8: data differs"),
    "SW320": lambda: with_log("rank 2 hung: no step for 900 s"),
    "SW321": lambda: with_log("rank 8 on gpu-b does not see the runs directory of rank 0 on gpu-a"),
    "SW322": lambda: replace(cut_off(), now=cut_off().whole[-1]["time"] + 600),
    "SW340": lambda: with_log(CHANNEL.format("NET/Socket/0")),
    "SW341": lambda: with_log(CHANNEL.format("NET/IB/0")),
    "SW342": lambda: with_log(CHANNEL.format("SHM/direct/direct")),
    "SW343": lambda: with_log("NCCL INFO NVLS multicast support is not available on dev 3"),
}


def found_in(case: Case) -> dict[str, str]:
    return {each.check.id: each.evidence for each in find_faults(RUN_CHECKS, case)}


@pytest.mark.parametrize("name", [check.id for check in RUN_CHECKS])
def test_a_fault_is_found(name: str) -> None:
    found = found_in(FAULTS[name]())
    assert name in found, found


def test_healthy_runs_are_quiet() -> None:
    plans = [plan for plan in healthy_plans() if plan.forecast is not None]
    assert len(plans) >= 20
    for seed, plan in enumerate(plans):
        case = slow_runs.healthy_run(plan, seed, profiled=seed % 2 == 0)
        found = diagnose(replace(case, logs=(LogText("rank-0.log", HEALTHY),)))
        assert found.findings == (), (plan.model.name, plan.cluster.name)


def test_the_cause_of_slow_runs_is_named_first() -> None:
    runs = list(slow_runs.made_runs())
    assert len(runs) == 30 and len({run.cause for run in runs}) == 10
    named = [(run.cause, rank_causes(run.case)) for run in runs]
    right = [bool(found) and found[0][0].check.id == cause for cause, found in named]
    assert sum(right) >= 27


@pytest.mark.parametrize("name", slow_runs.MORE)
def test_other_causes_are_named_first(name: str) -> None:
    made = slow_runs.MORE[name][1](PLAN, 1, 0.4)
    assert rank_causes(made.run())[0][0].check.id == name


def test_every_cause_has_a_run_or_a_test() -> None:
    tested = {*slow_runs.CAUSES, *slow_runs.MORE, "SW409", "SW415"}
    assert {check.id for check in SLOW} == tested


def test_compilation_and_overflows_are_named() -> None:
    def slow_start(event: dict[str, Any]) -> dict[str, Any]:
        is_first = event["step"] == slow_runs.EVERY
        return {**event, "step_s": 40 * event["step_s"]} if is_first else event

    assert rank_causes(with_steps(slow_start))[0][0].check.id == "SW409"
    case = with_event("loss_scale", step=600, scale=64.0, overflows=300)
    slower = [
        {**e, "step_s": 1.5 * e["step_s"]} if e["event"] == "step" else e
        for e in case.run.events
        if e["event"] != "profile"
    ]
    case = replace(case, run=replace(case.run, events=tuple(slower)))
    assert "SW415" in [finding.check.id for finding, _ in rank_causes(case)]


def test_causes_are_first_among_warnings_and_in_json() -> None:
    late = next(run for run in slow_runs.made_runs() if run.cause == "SW402")
    found = diagnose(late.case)
    assert found.findings[0].check.id == "SW402"
    assert "for rank 5 (costs about 19%)" in found.findings[0].evidence
    assert found.details["causes"][0]["id"] == "SW402"


def test_a_run_at_work_is_not_silent() -> None:
    case = cut_off()
    assert found_in(replace(case, now=case.whole[-1]["time"] + 5)) == {}
    # One that has ended may be as old as it likes.
    assert found_in(replace(healthy(), now=healthy().whole[-1]["time"] + 10**6)) == {}


@pytest.mark.parametrize("value", [0, "x", None, -1.0, float("nan"), [], {}, 1e300])
def test_a_record_with_wrong_values_is_looked_at_all_the_same(value: Any) -> None:
    for field in ("step_s", "data_share", "write_s", "stage_s", "rows", "straggler", "scale"):
        case = with_event("checkpoint", step=600, stage_s=1.0, write_s=1.0)
        events = [{**event, field: value} if field in event else event for event in case.run.events]
        diagnose(replace(case, run=replace(case.run, events=tuple(events))))
