"""Which rank failed first, and why: one error from the failures of many processes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ExitCode, UserError
from shardwise.launch.ranks import RankFailure

# Errors with an outside cause, which another start may not meet.
_PASSING_TYPES = {
    "AcceleratorError",
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "TimeoutError",
}
# The same errors of libraries that raise RuntimeError or OSError for everything.
_PASSING_WORDS = re.compile(
    r"CUDA error|NCCL error|ncclSystemError|ncclRemoteError|ncclUnhandledCudaError"
    r"|Connection (closed|reset|refused)|closed by peer|Socket (closed|timeout)|timed out"
    r"|\[Errno (5|70|104|107|110|112|113|116|121)\]",
    re.IGNORECASE,
)
# UserError and its subclasses, as `record` spells them.
_USER_ERROR = re.compile(r"(UserError|LostLease|Unreadable|Pruned): ")
# CUDA and NCCL report a wrong index and a wrong call with these.
_LASTING_WORDS = re.compile(r"device-side assert|ncclInvalid(Usage|Argument)")


class Passing(UserError):
    """A failure that another start of the ranks may not meet again."""


def error_of(failures: list[RankFailure], run_dir: Path) -> UserError:
    """The cause as a UserError: rank, cause, fix, log."""
    first = _first_failure(failures)
    details = details_of(first)
    log = _newest_log(run_dir, first.rank)
    cause = details.get("what") or f"it ended with exit code {first.exitcode} and no message"
    if first.exitcode == ExitCode.PREEMPTED:
        return UserError(cause, fix=details.get("fix", ""), code=ExitCode.PREEMPTED)
    kind = Passing if may_pass(first, details) else UserError
    return kind(
        f"rank {first.rank} failed: {cause}",
        why=details.get("why", "") or details.get("frame", ""),
        fix=details.get("fix") or f"read {log}; then run the same command again to resume",
        code=known_exit_code(first.exitcode),
    )


def _first_failure(failures: list[RankFailure]) -> RankFailure:
    """The first failure. A killed rank causes broken connections of its peers, though it leaves
    no record."""
    killed = [failure for failure in failures if failure.exitcode < 0]
    return min(killed or failures, key=lambda failure: failure.time)


def details_of(failure: RankFailure) -> dict[str, Any]:
    """What `record` wrote. A UserError of the worker is split into its parts again."""
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return {"what": f"killed by signal {name}", "why": _why_killed(failure.exitcode)}
    try:
        data = json.loads(failure.error_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    message = data.get("message", {})
    if not isinstance(message, dict):
        return {"what": str(message)}
    text = str(message.get("message", ""))
    passing = message.get("extraInfo", {}).get("passing", False)
    return _parse(text) | {"frame": _frame(message), "raised": text, "passing": passing}


def may_pass(failure: RankFailure, details: Mapping[str, Any]) -> bool:
    """Whether a failure may pass: a death by signal or without a message, or an error of the
    network, the devices or the disk.

    Any other Python error, such as a wrong index or a missing file, comes again from the same
    input. So does the UserError of a rank.
    """
    raised = str(details.get("raised", ""))
    if failure.exitcode < 0 or not raised:
        return "what" not in details or failure.exitcode < 0
    # A rank under torchrun says so itself, because its error has another form.
    return bool(details.get("passing")) or comes_from_outside(raised)


def comes_from_outside(raised: str) -> bool:
    """Whether `Type: words` is an error of the network, the devices or the disk."""
    kind = raised.partition(":")[0].rpartition(".")[2]
    if _USER_ERROR.match(raised) or _LASTING_WORDS.search(raised):
        return False
    return kind in _PASSING_TYPES or _PASSING_WORDS.search(raised) is not None


def _parse(text: str) -> dict[str, Any]:
    """`UserError: what / why: ... / fix: ...` as its parts, or the last line of anything else."""
    lines = text.strip().splitlines() or [""]
    found = _USER_ERROR.match(lines[0])
    if found is None:
        return {"what": lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1].strip()}"}
    parts: dict[str, Any] = {}
    key, lines[0] = "what", lines[0].removeprefix(found.group())
    for line in lines:
        for name in ("why", "fix"):
            if line.startswith(f"  {name}: "):
                key, line = name, line.removeprefix(f"  {name}: ")
        parts[key] = f"{parts[key]}\n{line}" if key in parts else line
    return parts


def _frame(message: dict[str, Any]) -> str:
    stack = str(message.get("extraInfo", {}).get("py_callstack", "")).splitlines()
    frames = [line.strip() for line in stack if line.strip().startswith("File ")]
    return frames[-1] if frames else ""


def known_exit_code(code: int) -> ExitCode:
    """The exit code of a worker that ended with a UserError; any other worker has died."""
    known = {
        ExitCode.CONFIG,
        ExitCode.DOES_NOT_FIT,
        ExitCode.ENVIRONMENT,
        ExitCode.VERIFY_FAILED,
        ExitCode.DIVERGED,
        ExitCode.PREEMPTED,
    }
    return ExitCode(code) if code in known else ExitCode.WORKER_DIED


def _why_killed(exitcode: int) -> str:
    if exitcode == -9:
        return "SIGKILL: the kernel ran out of memory, or someone killed it (see dmesg)"
    return ""


def _newest_log(run_dir: Path, rank: int) -> Path:
    attempts = list((run_dir / "logs").glob("attempt-*"))
    newest = max(attempts, key=lambda path: int(path.name.split("-")[1]), default=run_dir / "logs")
    return newest / f"rank-{rank}.log"
