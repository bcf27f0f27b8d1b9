"""A sink can be slow, fail or hang: the record stays whole and the writer never waits."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.metrics.events import EventLog, read_events
from shardwise.metrics.sinks.feed import Feed

# What a sink raises ends its thread, and its stack goes to the log: that is meant here.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Memory:
    """Keeps what it sees."""

    def __init__(self, *, fails_at: int | None = None, waits: threading.Event | None = None):
        self.seen: list[dict[str, Any]] = []
        self.closed = False
        self.fails_at = fails_at
        self.waits = waits

    def see(self, event: dict[str, Any]) -> None:
        if self.waits is not None:
            self.waits.wait(30)
        if self.fails_at is not None and event.get("step") == self.fails_at:
            raise ValueError(f"step {self.fails_at} is too much")
        self.seen.append(event)

    def close(self) -> None:
        self.closed = True


def wait_for_failure(feed: Feed) -> None:
    deadline = time.monotonic() + 10
    while feed.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_sink_sees_what_the_record_holds(tmp_path: Path) -> None:
    memory = Memory()
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=True, observers=[Feed("memory", lambda: memory)]) as log:
        for step in range(50):
            log.write("step", step=step, loss=1 / (step + 1))
    assert memory.seen == read_events(file)
    assert len(memory.seen) == 50
    assert memory.closed


def test_a_sink_that_fails_is_named_once_and_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    bad, good = Memory(fails_at=1), Memory()
    feeds = [Feed("bad", lambda: bad), Feed("good", lambda: good)]
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=True, observers=feeds, say=said.append) as log:
        log.write("step", step=0)
        log.write("step", step=1)
        wait_for_failure(feeds[0])
        log.write("step", step=2)
        log.write("step", step=3)
    failures = [event for event in read_events(file) if event["event"] == "sink_failed"]
    assert [(one["sink"], one["reason"]) for one in failures] == [
        ("bad", "ValueError: step 1 is too much")
    ]
    assert said == ["ALERT: bad gets no more events: ValueError: step 1 is too much"]
    assert good.seen == read_events(file)
    assert bad.closed


def test_a_sink_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    def refuse() -> Memory:
        raise ModuleNotFoundError("No module named 'wandb'")

    feed = Feed("wandb", refuse)
    wait_for_failure(feed)
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=True, observers=[feed]) as log:
        log.write("start", step=0)
    assert [event["event"] for event in read_events(file)] == ["start", "sink_failed"]


def test_a_sink_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    gate = threading.Event()
    feed = Feed("stuck", lambda: Memory(waits=gate), max_behind=10, close_s=0.2)
    file = tmp_path / "events.jsonl"
    # Until the gate opens the sink takes nothing, so a log that waits for it never comes so far.
    with EventLog(file, enabled=True, observers=[feed]) as log:
        for step in range(100):
            log.write("step", step=step)
    gate.set()
    events = read_events(file)
    assert sum(event["event"] == "step" for event in events) == 100
    assert [event["reason"] for event in events if event["event"] == "sink_failed"] == [
        "it is 10 events behind"
    ]


def test_a_log_that_writes_nothing_still_feeds_its_sinks(tmp_path: Path) -> None:
    memory = Memory()
    file = tmp_path / "events.jsonl"
    with EventLog(file, enabled=False, observers=[Feed("memory", lambda: memory)]) as log:
        log.write("step", step=1)
    assert [event["step"] for event in memory.seen] == [1]
    assert not file.exists()


def test_a_sink_on_a_full_disk_is_tried_again_and_what_it_missed_is_counted(tmp_path: Path) -> None:
    said: list[str] = []
    disk_is_full = threading.Event()
    opened: list[Memory] = []

    class OnDisk(Memory):
        def see(self, event: dict[str, Any]) -> None:
            if disk_is_full.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            super().see(event)

    def open_sink() -> Memory:
        opened.append(OnDisk())
        return opened[-1]

    feed = Feed("tensorboard", open_sink, retry_s=0.02)
    with EventLog(
        tmp_path / "events.jsonl", enabled=True, observers=[feed], say=said.append
    ) as log:

        def write_until(condition: Any) -> None:
            deadline = time.monotonic() + 10
            while not condition() and time.monotonic() < deadline:
                log.write("step", step=1)
                time.sleep(0.01)

        write_until(lambda: opened and opened[0].seen)
        disk_is_full.set()
        write_until(lambda: len(opened) > 3)
        assert said == ["ALERT: tensorboard cannot be written: No space left on device"]
        disk_is_full.clear()
        write_until(lambda: len(said) > 1)
    assert feed.failure is None
    missing = len(read_events(tmp_path / "events.jsonl")) - sum(len(one.seen) for one in opened)
    assert missing > 3
    assert said[1:] == [f"tensorboard can be written again; {missing} events are missing"]
