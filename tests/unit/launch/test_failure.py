from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.durable_files import Unreadable
from shardwise.checkpoint.store import Pruned
from shardwise.errors import ExitCode, UserError
from shardwise.launch.failure import Passing, error_of
from shardwise.launch.ranks import RankFailure
from shardwise.lease.lease import LostLease


def failure(
    folder: Path, rank: int, exitcode: int, message: Any = None, *, at: int = 100
) -> RankFailure:
    """A rank's end, with the error file that torch's `record` leaves."""
    file = folder / f"error-{rank}.json"
    if message is not None:
        extra = {"py_callstack": '  File "loop.py", line 7, in run', "timestamp": str(at)}
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return RankFailure(rank, exitcode, file, float(at))


def error_from(folder: Path, *failures: RankFailure) -> UserError:
    (folder / "logs" / "attempt-2").mkdir(parents=True)
    (folder / "logs" / "attempt-10").mkdir()
    return error_of(list(failures), folder)


def recorded(error: UserError) -> str:
    return f"{type(error).__name__}: {error}"


def test_a_user_error_of_a_rank_keeps_its_parts_and_its_code(tmp_path: Path) -> None:
    raised = UserError("the disk is full", why="3 GiB are needed", fix="free some")
    error = error_from(tmp_path, failure(tmp_path, 1, 2, recorded(raised)))
    assert (error.what, error.why, error.fix) == (
        "rank 1 failed: the disk is full",
        "3 GiB are needed",
        "free some",
    )
    assert error.code == ExitCode.CONFIG


@pytest.mark.parametrize("kind", [LostLease, Unreadable, Pruned])
def test_its_kinds_come_apart_too_and_start_no_rank_again(
    tmp_path: Path, kind: type[UserError]
) -> None:
    raised = kind("step-1 cannot be read: timed out", why="a disk", fix="mend it")
    error = error_from(tmp_path, failure(tmp_path, 1, 4, recorded(raised)))
    assert error.what == "rank 1 failed: step-1 cannot be read: timed out"
    assert (error.why, error.fix) == ("a disk", "mend it")
    assert not isinstance(error, Passing)


@pytest.mark.parametrize("code", [ExitCode.DOES_NOT_FIT, ExitCode.ENVIRONMENT])
def test_known_exit_codes_are_kept(tmp_path: Path, code: ExitCode) -> None:
    error = error_from(tmp_path, failure(tmp_path, 0, int(code), recorded(UserError("x"))))
    assert error.code == code


def test_another_error_names_its_place_and_the_newest_log(tmp_path: Path) -> None:
    error = error_from(tmp_path, failure(tmp_path, 0, 1, "RuntimeError: shapes differ"))
    assert error.what == "rank 0 failed: RuntimeError: shapes differ"
    assert "loop.py" in error.why
    assert str(tmp_path / "logs/attempt-10/rank-0.log") in error.fix
    assert error.code == ExitCode.WORKER_DIED


def test_the_first_failure_is_the_cause(tmp_path: Path) -> None:
    error = error_from(
        tmp_path,
        failure(tmp_path, 0, 1, "RuntimeError: connection closed by peer", at=200),
        failure(tmp_path, 3, 1, "ValueError: the cause", at=100),
    )
    assert "rank 3 failed: ValueError: the cause" in error.what


def test_a_killed_rank_is_the_cause_of_its_peers_errors(tmp_path: Path) -> None:
    error = error_from(
        tmp_path,
        failure(tmp_path, 0, 1, "RuntimeError: connection closed by peer", at=100),
        failure(tmp_path, 1, -9, at=101),
    )
    assert "rank 1 failed: killed by signal SIGKILL" in error.what
    assert "out of memory" in error.why
    assert error.code == ExitCode.WORKER_DIED


def test_all_lines_of_what_is_wrong_are_kept(tmp_path: Path) -> None:
    raised = UserError("2 records cannot be read:\n    a.jsonl:1: bad\n    a.jsonl:2: bad", why="w")
    error = error_from(tmp_path, failure(tmp_path, 0, 2, recorded(raised)))
    assert "a.jsonl:1: bad" in error.what
    assert "a.jsonl:2: bad" in error.what


LASTING = [
    "UserError: the disk is full",
    "ImportError: no module named x",
    "ModuleNotFoundError: No module named 'x'",
    "IndexError: index 1024 is out of bounds",
    "KeyError: 'hidden'",
    "TypeError: int() argument must be a string",
    "ValueError: bad file",
    "FileNotFoundError: [Errno 2] No such file or directory: 'a'",
    "OSError: [Errno 28] No space left on device",
    "PermissionError: [Errno 13] Permission denied: 'a'",
    "RuntimeError: The size of tensor a (3) must match the size of tensor b (4)",
    "RuntimeError: CUDA error: device-side assert triggered",
    "torch.distributed.DistBackendError: NCCL error: ncclInvalidUsage: Duplicate GPU detected",
    "UserError: Connection refused",
]
PASSING = [
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms",
    "DistBackendError: NCCL error in: x.cpp:1, unhandled system error, ncclSystemError",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "OSError: [Errno 5] Input/output error: 'shard-0'",
    "OSError: [Errno 116] Stale file handle",
    "TimeoutError: no answer",
]


@pytest.mark.parametrize("message", LASTING)
def test_an_error_that_would_come_again_is_final(tmp_path: Path, message: str) -> None:
    error = error_from(tmp_path, failure(tmp_path, 0, 1, message))
    assert not isinstance(error, Passing)


@pytest.mark.parametrize("message", PASSING)
def test_an_error_from_outside_may_pass(tmp_path: Path, message: str) -> None:
    error = error_from(tmp_path, failure(tmp_path, 0, 1, message))
    assert isinstance(error, Passing)


@pytest.mark.parametrize("exitcode", [-9, -11, -6, 1])
def test_a_death_without_a_word_may_pass(tmp_path: Path, exitcode: int) -> None:
    assert isinstance(error_from(tmp_path, failure(tmp_path, 0, exitcode)), Passing)
