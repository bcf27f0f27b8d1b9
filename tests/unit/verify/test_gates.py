"""Each gate passes a good run and fails a bad one, through the command too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.cli.summary import summary_lines
from shardwise.errors import ExitCode, UserError
from shardwise.metrics.events import EventLog, read_events
from shardwise.plan.planned import Plan
from shardwise.verify.gates import check_gates
from shardwise.verify.judge import judge_run, record_gates


def step(plan: Plan, number: int, **changes: Any) -> dict[str, Any]:
    assert plan.forecast is not None
    good = {
        "event": "step",
        "step": number,
        "step_s": 1.0,
        "loss": 4.0 - 0.1 * number,
        "grad_norm": 1.0,
        "data_share": 0.0,
        "tokens_per_s": plan.forecast.tokens_per_s,
        "efficiency": {"mfu": 0.5, "hfu": 0.5},
        "memory": {"allocated": plan.memory.allocated, "reserved": plan.memory.reserved},
        "memory_capacity": plan.cluster.memory_bytes,
    }
    return {**good, **changes}


def failed(plan: Plan, events: list[dict[str, Any]], damaged: tuple[str, ...] = ()) -> list[str]:
    gates = check_gates(plan, events, damaged)
    assert all(gate.advice for gate in gates if gate.verdict != "pass")
    return [gate.name for gate in gates if gate.verdict == "fail"]


def test_a_good_run_passes_every_gate(plan: Plan) -> None:
    profiled = {"event": "profile", "step": 5, "exposed_share": 0.04}
    gates = check_gates(plan, [*(step(plan, n) for n in range(1, 12)), profiled], ())
    assert {gate.verdict for gate in gates} == {"pass"}
    assert len(gates) == 9


@pytest.mark.parametrize(
    ("gate", "changes"),
    [
        ("mfu", {"efficiency": {"mfu": 0.3, "hfu": 0.3}}),
        ("memory", {"memory": {"allocated": 1, "reserved": 10**12}}),
        ("loss", {"loss": float("nan")}),
        ("plan", {"tokens_per_s": 1.0}),
    ],
)
def test_a_bad_figure_fails_its_gate(plan: Plan, gate: str, changes: dict[str, Any]) -> None:
    assert gate in failed(plan, [step(plan, n, **changes) for n in range(1, 12)])


def test_one_spike_of_the_gradient_fails(plan: Plan) -> None:
    events = [step(plan, n, grad_norm=20.0 if n == 7 else 1.0) for n in range(1, 12)]
    assert failed(plan, events) == ["gradient norm"]


def test_unsteady_steps_fail(plan: Plan) -> None:
    events = [step(plan, n, step_s=1.0 + 0.3 * (n % 2)) for n in range(1, 12)]
    assert failed(plan, events) == ["step time"]


def test_steps_without_a_time_are_not_judged(plan: Plan) -> None:
    gates = check_gates(plan, [step(plan, n, step_s=0) for n in range(1, 12)], ())
    assert [gate.verdict for gate in gates if gate.name == "step time"] == ["skip"]


def test_a_loss_that_rises_fails(plan: Plan) -> None:
    rising = [step(plan, n, loss=3.0 + 0.1 * n) for n in range(1, 12)]
    assert failed(plan, rising) == ["loss"]
    # Random tokens cannot be learnt; a loss that is not finite is wrong all the same.
    data = replace(plan.config.data, source="synthetic")
    random = replace(plan, config=replace(plan.config, data=data))
    assert failed(random, rising) == []
    assert "loss" in failed(random, [step(plan, n, loss=float("nan")) for n in range(1, 12)])


def test_communication_that_nothing_hides_fails(plan: Plan) -> None:
    steps = [step(plan, n) for n in range(1, 12)]
    profiled = {"event": "profile", "step": 5, "exposed_share": 0.31}
    (gate,) = [g for g in check_gates(plan, [*steps, profiled], ()) if g.verdict == "fail"]
    assert (gate.name, gate.figure) == ("overlap", "31.0%")
    exposed = {"shard": 0.01, "tensor": 0.2, "expert": 0.05}
    axes = [{"axis": axis, "exposed_s": seconds} for axis, seconds in exposed.items()]
    gates = check_gates(plan, [*steps, {**profiled, "axes": axes}], ())
    (gate,) = [gate for gate in gates if gate.verdict == "fail"]
    assert "most of it is along tensor;" in gate.advice
    (gate,) = [g for g in check_gates(plan, steps, ()) if g.verdict == "skip"]
    assert gate.name == "overlap" and "observe.profile" in gate.advice


def test_a_late_rank_fails_by_its_number(plan: Plan) -> None:
    late = {"event": "collectives", "step": 8, "straggler": {"rank": 3, "behind_s": 0.2}}
    events = [*(step(plan, n) for n in range(1, 12)), late]
    (gate,) = [g for g in check_gates(plan, events, ()) if g.verdict == "fail"]
    assert gate.name == "ranks" and "rank 3 200 ms" in gate.figure


def test_a_damaged_checkpoint_fails(plan: Plan) -> None:
    events = [step(plan, n) for n in range(1, 12)]
    assert failed(plan, events, ("quarantined-step-00000004",)) == ["checkpoints"]


def test_of_a_step_done_twice_the_last_counts(plan: Plan) -> None:
    lost = [step(plan, 5, loss=float("nan"))]
    assert failed(plan, [*lost, *(step(plan, n) for n in range(1, 12))]) == []


def write_run(folder: Path, plan: Plan, events: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    plan.save(folder / "plan.json")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_the_command_prints_the_table_and_its_exit_code(plan: Plan, tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", plan, [step(plan, n) for n in range(1, 12)])
    done = CliRunner().invoke(app, ["verify", str(good)])
    assert done.exit_code == 0 and "gradient norm" in done.stdout
    bad = write_run(tmp_path / "bad", plan, [step(plan, n, grad_norm=9.0**n) for n in range(1, 9)])
    done = CliRunner().invoke(app, ["verify", str(bad), "--json"])
    assert isinstance(done.exception, UserError)
    assert done.exception.code == ExitCode.VERIFY_FAILED
    gates = {gate["name"]: gate["verdict"] for gate in json.loads(done.stdout)}
    assert gates["gradient norm"] == "fail" and gates["mfu"] == "pass"


def test_a_verdict_is_recorded_once_for_each_end(plan: Plan, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plan, [step(plan, n) for n in range(1, 12)])
    for _ in range(2):
        record_gates(run, judge_run(run))
    events = read_events(run / "events.jsonl")
    assert [event["event"] for event in events[-2:]] == ["step", "gates"]
    assert {gate["verdict"] for gate in events[-1]["gates"]} <= {"pass", "skip"}
    with EventLog(run / "events.jsonl", enabled=True) as log:
        log.write(**step(plan, 12))
    record_gates(run, judge_run(run))
    judged = [event for event in read_events(run / "events.jsonl") if event["event"] == "gates"]
    assert [event["step"] for event in judged] == [11, 12]


def test_parity_compares_bits_or_within_a_tolerance(plan: Plan, tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", plan, [step(plan, n) for n in range(1, 5)])
    near = [step(plan, n, loss=(4.0 - 0.1 * n) * (1 + 1e-7 * (n > 2))) for n in range(1, 5)]
    other = write_run(tmp_path / "other", plan, near)
    same = CliRunner().invoke(app, ["verify", "--parity", str(one), str(one)])
    assert same.exit_code == 0 and "4 steps compared: the same bits" in same.stdout
    apart = CliRunner().invoke(app, ["verify", "--parity", str(one), str(other)])
    assert isinstance(apart.exception, UserError) and "from step 3 on" in str(apart.exception)
    words = ["verify", "--parity", str(one), str(other), "--tolerance", "1e-6"]
    assert CliRunner().invoke(app, words).exit_code == 0


def test_malformed_lines_are_counted_in_the_table_the_json_and_the_comparison(
    plan: Plan, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", plan, [step(plan, n) for n in range(1, 12)])
    with (run / "events.jsonl").open("a") as file:
        file.write('[]\n{"event": "step", "step": 12, "loss": "x"}\n{"event": "st')
    shown = CliRunner().invoke(app, ["verify", str(run)])
    assert shown.exit_code == 0 and "record" in shown.stdout
    assert "3 of 14 lines malformed" in shown.stdout and "line 12" in shown.stdout
    told = json.loads(CliRunner().invoke(app, ["verify", str(run), "--json"]).stdout)
    assert told[-1]["name"] == "record" and told[-1]["verdict"] == "warn"
    compared = CliRunner().invoke(app, ["verify", "--parity", str(run), str(run)])
    assert compared.stdout.count("3 of 14 lines of events.jsonl are malformed") == 2
    # A run whose every line is malformed has no step to judge, and the count is shown all the same.
    (run / "events.jsonl").write_text("[]\n")
    lost = CliRunner().invoke(app, ["verify", str(run)])
    assert isinstance(lost.exception, UserError)
    assert lost.exception.code == ExitCode.VERIFY_FAILED
    assert "1 of 1 lines malformed" in lost.stdout
    config = replace(plan.config, name=run.name, runs_dir=str(tmp_path))
    (line,) = summary_lines(replace(plan, config=config), judge_run(run))
    assert "gate warn" in line and "record: 1 of 1 lines malformed" in line


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert isinstance(done.exception, UserError) and "is no run directory" in done.exception.what
