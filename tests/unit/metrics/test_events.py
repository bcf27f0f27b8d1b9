from __future__ import annotations

import json
from pathlib import Path

from shardwise.metrics.events import EventLog, read_events


def test_events_are_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=True) as log:
        log.write("start", step=0)
        log.write("step", step=1, loss=2.5, memory={"allocated": 1})
    lines = file.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "step"]
    start, step = read_events(file)
    assert start["time"] <= step["time"]
    assert (step["loss"], step["memory"]) == (2.5, {"allocated": 1})


def test_an_event_can_be_read_before_the_log_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=True) as log:
        log.write("start")
        assert len(read_events(file)) == 1


def test_a_second_attempt_goes_on_in_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    for attempt in (1, 2):
        with EventLog(file, enabled=True) as log:
            log.write("start", attempt=attempt)
    assert [event["attempt"] for event in read_events(file)] == [1, 2]


def test_a_log_that_is_off_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=False) as log:
        log.write("start")
    assert not file.exists()


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=True) as log:
        log.write("start")
        log.write("step", step=1)
    whole = file.read_text()
    file.write_text(whole[:-7])
    assert [event["event"] for event in read_events(file)] == ["start"]
    file.write_text(whole[:-1])  # the object is whole, only the end of the line is missing
    assert [event["event"] for event in read_events(file)] == ["start", "step"]


def test_a_torn_line_does_not_spoil_the_next_attempt(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=True) as log:
        log.write("start")
        log.write("step", step=1)
    file.write_text(file.read_text()[:-7])
    with EventLog(file, enabled=True) as log:
        log.write("resume")
    assert [event["event"] for event in read_events(file)] == ["start", "resume"]


def test_no_events_yet(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    assert read_events(tmp_path / "events.jsonl") == []
