"""Every known line is found as itself, and healthy logs are quiet."""

from __future__ import annotations

from pathlib import Path

import pytest
from known_lines import HEALTHY, KNOWN_LINES

from shardwise.doctor.check import by_severity, find_faults
from shardwise.doctor.signatures import SIGNATURES
from shardwise.doctor.signatures.log import LogText, read_run_logs


def found_in(*texts: str) -> dict[str, str]:
    logs = [LogText(f"attempt-1/rank-{at}.log", text) for at, text in enumerate(texts)]
    return {each.check.id: each.evidence for each in find_faults(SIGNATURES, logs)}


def test_there_are_sixty_and_each_has_a_line() -> None:
    assert len(SIGNATURES) >= 60
    assert [check.id for check in SIGNATURES] == list(KNOWN_LINES)


@pytest.mark.parametrize("name", KNOWN_LINES)
def test_a_known_line_is_found(name: str) -> None:
    found = found_in(f"{HEALTHY}{KNOWN_LINES[name]}\n{HEALTHY}")
    number = HEALTHY.count("\n") + 1
    assert found[name].startswith(f"attempt-1/rank-0.log, line {number}: ")
    # A line may say two things, such as a full disk in shared memory, but not many.
    assert len(found) <= 3, found


def test_healthy_logs_are_quiet() -> None:
    assert found_in(HEALTHY, HEALTHY * 20) == {}


def test_long_lines_are_cut_around_what_was_found() -> None:
    text = "x" * 5000 + " CUDA out of memory. Tried " + "y" * 5000
    (told,) = found_in(text).values()
    assert "CUDA out of memory" in told and len(told) < 400


def test_what_follows_from_another_error_comes_after_it() -> None:
    text = "\n".join([KNOWN_LINES["SW508"], KNOWN_LINES["SW564"], KNOWN_LINES["SW530"]])
    logs = [LogText("rank-0.log", text)]
    ids = [each.check.id for each in by_severity(find_faults(SIGNATURES, logs))]
    assert ids == ["SW530", "SW508", "SW564"]


def test_the_newest_attempts_of_a_run_are_read(tmp_path: Path) -> None:
    for attempt in (1, 2, 10):
        folder = tmp_path / "logs" / f"attempt-{attempt}"
        folder.mkdir(parents=True)
        for rank in (0, 1, 10):
            (folder / f"rank-{rank}.log").write_bytes(b"\xff said\x00 " + str(rank).encode())
    (tmp_path / "logs/attempt-10/rank-10.log").unlink()
    (tmp_path / "logs/attempt-10/rank-10.log").mkdir()  # cannot be read
    names = [log.name for log in read_run_logs(tmp_path)]
    assert names == [
        *(f"attempt-10/rank-{rank}.log" for rank in (0, 1)),
        *(f"attempt-2/rank-{rank}.log" for rank in (0, 1, 10)),
    ]
    assert read_run_logs(tmp_path / "nothing") == []
