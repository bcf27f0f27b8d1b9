from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostile import put_holes, put_pipe, within

from shardwise.lease.lease import LostLease
from shardwise.metrics import read_events as record_module
from shardwise.metrics.events import EventLog, read_events
from shardwise.metrics.read_events import read_record


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


def test_malformed_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=True) as log:
        log.write("start", step=0)
        log.write("eval", step=1, loss=2.0)
    odd = [b"[]", b"7", b'"x"', b"null", b'{"event": 3}', b"\xff\xfe", b"9" * 5000, b"[" * 9000]
    no_event = [*odd, b'{"event": "st']
    not_whole = [b'{"event": "eval", "step": "x", "loss": []}', b'{"event": "end", "step": -1}']
    with file.open("ab") as stream:
        stream.write(b"\n\n" + b"\n".join(no_event + not_whole))
    record = read_record(file)
    assert [event["event"] for event in record.whole] == ["start", "eval"]
    assert len(record.events) == 4
    assert (record.num_lines, record.num_malformed) == (2 + 11, 11)
    assert record.fault.startswith("11 of 13 lines of events.jsonl are malformed")
    assert record.fault.endswith("the first is line 5")


def test_a_record_without_malformed_lines_has_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=True) as log:
        log.write("start", step=0)
    assert read_record(file).fault == ""
    assert read_record(file, end=3).num_malformed == 1


def test_a_record_that_is_no_file_or_far_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with within(5), pytest.raises(OSError, match="a pipe and no plain file"):
        read_record(put_pipe(tmp_path / "events.jsonl"))
    with pytest.raises(OSError, match="bytes, where at most"):
        read_record(put_holes(tmp_path / "large", 2**40))
    # One line without an end is one malformed line, of which only the beginning is held.
    monkeypatch.setattr(record_module, "_MAX_LINE_BYTES", 1000)
    with put_holes(tmp_path / "zeros", 10_000).open("ab") as file:
        file.write(b'\n{"event": "resume", "step": 3}\n')
    record = read_record(tmp_path / "zeros")
    assert (record.num_malformed, record.whole) == (1, [{"event": "resume", "step": 3}])


class Fence:
    """The run directory is another job's from the next look on."""

    epoch = 1
    lost = False

    def validate(self) -> None:
        self.lost = True
        raise LostLease("another job has it")


class Seen:
    """An observer that keeps what it sees."""

    name, failure = "a list", None

    def __init__(self) -> None:
        self.events: list[str] = []

    def news(self) -> list[str]:
        return []

    def see(self, event: dict[str, object]) -> None:
        self.events.append(str(event["event"]))

    def close(self) -> None:
        self.events.append("closed")


def test_who_has_lost_the_directory_shows_observers_nothing_either(tmp_path: Path) -> None:
    """TensorBoard's files lie in the run directory too."""
    file, seen = tmp_path / "events.jsonl", Seen()
    with EventLog(file, enabled=True, observers=[seen], fence=Fence()) as log:
        log.write("step", step=14)
        log.write("checkpoint", step=14)
    assert file.read_bytes() == b""
    assert seen.events == ["closed"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one page."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_costs_lines_which_are_counted_and_nothing_else(full_disk: Path) -> None:
    file, said = full_disk / "events.jsonl", list[str]()
    with EventLog(file, enabled=True, say=said.append) as log:
        for step in range(100):
            log.write("step", step=step)
        assert said == ["ALERT: events.jsonl cannot be written: No space left on device"]
        written = [event["step"] for event in read_events(file)]
        assert written == list(range(len(written))) and 10 < len(written) < 100
        subprocess.run(["mount", "-o", "remount,size=1m", str(full_disk)], check=True)
        log.write("step", step=100)
        log.write("step", step=101)
    # The line that was cut by the end of the disk is not joined to the next.
    *before, first, second = read_events(file)
    assert [event["step"] for event in before] == written
    assert (first["step"], first["lines_lost"]) == (100, 100 - len(written))
    assert second["step"] == 101 and "lines_lost" not in second
    missing = 100 - len(written)
    assert said[1:] == [f"events.jsonl can be written again; {missing} lines of it are missing"]


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes; what does not fit is not written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("missing", [1, 2])
def test_a_line_counts_as_lost_unless_its_break_alone_does_not_fit(
    missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.metrics.events.time.time", lambda: 1.0)
    file, said = tmp_path / "events.jsonl", list[str]()
    with EventLog(file, enabled=True, say=said.append) as log:
        log.write("step", step=1)
        with files_end_at(2 * file.stat().st_size - missing):
            log.write("step", step=2)
        log.write("step", step=3)
    lost = missing > 1
    assert [event["step"] for event in read_events(file)] == ([1, 3] if lost else [1, 2, 3])
    assert read_events(file)[-1].get("lines_lost", 0) == int(lost)
    assert len(said) == 2 * int(lost), said


def test_a_record_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "away"
    with EventLog(folder / "events.jsonl", enabled=True) as log:
        log.write("start")
        folder.mkdir()
        log.write("step", step=1)
    (event,) = read_events(folder / "events.jsonl")
    assert (event["event"], event["lines_lost"]) == ("step", 1)
