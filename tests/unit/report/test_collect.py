"""What a run directory tells, whole, half or broken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hostile import put_holes, put_pipe, within
from sample_runs import BEGAN, SampleRun, eventful, keep_checkpoints, plan_of

from shardwise.report.collect import collect_run, collect_runs, state_of


def write_events(folder: Path, *events: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": BEGAN + at, **event}) for at, event in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def step(number: int, loss: float) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": loss}


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in collect_run(folder).steps}


def test_a_step_that_repeats_keeps_its_last_value(tmp_path: Path) -> None:
    folder = write_events(
        tmp_path,
        {"event": "start", "step": 0},
        step(10, 5.0),
        step(20, 4.0),
        {"event": "resume", "step": 10},
        {"event": "start", "step": 10},
        step(20, 4.5),
        step(30, 3.5),
    )
    assert losses(folder) == {10: 5.0, 20: 4.5, 30: 3.5}


def test_steps_that_a_resume_threw_away_are_gone_until_they_are_done_again(tmp_path: Path) -> None:
    before = [{"event": "start", "step": 0}, step(10, 5.0), step(20, 4.0), step(30, 3.0)]
    folder = write_events(tmp_path, *before, {"event": "resume", "step": 10}, step(20, 4.4))
    assert losses(folder) == {10: 5.0, 20: 4.4}


def test_a_rollback_counts_as_going_back(tmp_path: Path) -> None:
    folder = write_events(tmp_path, step(10, 5.0), step(20, 9.0), {"event": "rollback", "step": 10})
    assert losses(folder) == {10: 5.0}


def test_the_first_step_of_every_start_is_not_steady(tmp_path: Path) -> None:
    run = collect_run(eventful(plan_of(tmp_path, "train.steps=300")).write())
    logged, steady = ([event["step"] for event in kept] for kept in (run.steps, run.steady))
    assert set(logged) - set(steady) == {1, 151}


def test_half_lines_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    folder = write_events(tmp_path, {"event": "start", "step": 0}, step(10, 5.0))
    with (folder / "events.jsonl").open("ab") as file:
        file.write(
            b'17\n"text"\n[1, 2]\nnull\n{"event": 3}\n{"step": 4}\n\xff\xfe\x00\n{"event": "st'
        )
    assert losses(folder) == {10: 5.0}
    (note,) = [note for note in collect_run(folder).notes if "events.jsonl" in note]
    assert "of 10 lines of events.jsonl are malformed" in note


def test_pipes_and_large_files_become_notes(tmp_path: Path) -> None:
    put_pipe(tmp_path / "events.jsonl")
    put_pipe(tmp_path / "plan.json")
    put_holes(tmp_path / "config.yaml", 2**40)
    with within(5):
        run = collect_run(tmp_path)
    assert [note.partition(" cannot be read")[0] for note in run.notes] == [
        "events.jsonl", "plan.json", "config.yaml"
    ]  # fmt: skip
    assert (run.plan, run.events, run.config) == (None, (), "")


@pytest.mark.parametrize("value", ["text", None, True, [], {}, float("nan"), 1.5, 10**400])
def test_a_step_without_a_number_is_no_step(tmp_path: Path, value: Any) -> None:
    folder = write_events(tmp_path, {"event": "step", "step": value, "loss": 1.0}, step(10, 5.0))
    assert losses(folder) == {10: 5.0}


def test_an_empty_directory_is_a_record_with_notes(tmp_path: Path) -> None:
    run = collect_run(tmp_path)
    assert run.plan is None
    assert run.steps == []
    assert run.notes == ("there is no events.jsonl yet", "there is no plan.json")
    assert state_of(run, 0.0) == "not started"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"config": {"nonsense": {}}}', "\xff"])
def test_a_plan_that_cannot_be_read_is_a_note(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text, encoding="latin-1")
    run = collect_run(tmp_path)
    assert run.plan is None
    assert any("plan.json cannot be read" in note for note in run.notes)


def test_checkpoints_are_judged_without_torch(tmp_path: Path) -> None:
    keep_checkpoints(tmp_path, 10, 20, 30)
    root = tmp_path / "checkpoints"
    (root / "step-00000020" / "rank-00000.bin").write_bytes(b"shorter")
    (root / "step-00000030" / "rank-00000.bin").write_bytes(b"cut")
    (root / "partial-step-00000040").mkdir()
    bad = root / "quarantined-step-00000005"
    bad.mkdir()
    (bad / "reason.txt").write_text("rank-00000.bin: its content has changed\n")
    (root / "step-00000050").mkdir()
    found = {kept.step: (kept.state, kept.reason) for kept in collect_run(tmp_path).checkpoints}
    assert {step: state for step, (state, _) in found.items()} == {
        5: "quarantined",
        10: "not verified",
        20: "not verified",
        30: "damaged",
        40: "partial",
        50: "damaged",
    }
    assert found[5][1] == "rank-00000.bin: its content has changed"
    assert found[30][1] == "rank-00000.bin: has 3 bytes, 7 were written"
    assert "manifest.json" in found[50][1]


def test_the_state_of_a_run_in_words(tmp_path: Path) -> None:
    run = SampleRun(plan_of(tmp_path, "train.steps=300"))
    run.start(0)
    run.train(1, 20)
    going = collect_run(run.write())
    assert state_of(going, run.now + 75) == "running or dead: its last event was 1m15s ago"
    assert not going.has_ended
    run.say("stopped", step=20, reason="SIGTERM")
    assert state_of(collect_run(run.write()), run.now) == "stopped by SIGTERM, and saved"
    run.say("end", step=20, finished=False, loss=1.0)
    folder = run.write()
    assert state_of(collect_run(folder), run.now) == "ended as train.stop_after says"
    # Every start writes the plan anew, long before its first event.
    assert not collect_run(folder).has_ended
    os.utime(folder / "plan.json", (BEGAN, BEGAN))
    assert collect_run(folder).has_ended
    run.start(20)
    assert not collect_run(run.write()).has_ended


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [write_events(tmp_path / side / "demo", step(1, 1.0)) for side in ("a", "b")]
    assert [run.name for run in collect_runs(paths)] == [str(path) for path in paths]
    assert [run.name for run in collect_runs(paths[:1])] == ["demo"]
