from __future__ import annotations

import errno
import os

import pytest

from shardwise.launch.say import Lines, say_on_console, write_to


def test_lines_that_cannot_be_written_are_counted() -> None:
    fails, written = [True], list[str]()

    def write(text: str) -> None:
        if fails[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(text)

    lines = Lines(write)
    for number in range(3):
        lines.say(f"line {number}")
    fails[0] = False
    lines.say("line 3")
    lines.say("line 4")
    assert written == ["(3 lines before this one could not be written)\nline 3\n", "line 4\n"]


def test_a_console_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", encoding="utf-8", buffering=1) as gone:
        monkeypatch.setattr("sys.stdout", gone)
        say_on_console("nobody reads this")
        # Python would try the line once more as it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())
    say_on_console("the stream is closed")


def test_a_log_on_a_full_disk_is_written_as_far_as_it_goes() -> None:
    handle = os.open("/dev/full", os.O_WRONLY)
    Lines(write_to(handle)).say("text")
    os.close(handle)
