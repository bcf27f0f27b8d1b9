"""A report on the disk: written whole or not at all, and repeatedly while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote

from shardwise.errors import ExitCode, UserError
from shardwise.files import free_name, open_file, replace_file
from shardwise.report.collect import RunRecord, collect_runs
from shardwise.report.html import is_report, render_report

_HEAD_BYTES = 2000


def write_report(paths: Sequence[Path], target: Path, *, reload_s: float | None = None) -> int:
    """Read the runs, write the page; returns its size."""
    return _write(collect_runs(paths), target, reload_s)


def watch_runs(
    paths: Sequence[Path],
    target: Path,
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Write the page every few seconds until all runs have ended, or Ctrl-C.

    Returns whether they have ended.
    """
    try:
        while True:
            runs = collect_runs(paths)
            if all(run.has_ended for run in runs):
                _write(runs, target, None)
                return True
            _write(runs, target, every_s)
            sleep(every_s)
    except KeyboardInterrupt:
        # The last page must not reload itself.
        _write(collect_runs(paths), target, None)
        return False


def validate_target(target: Path) -> None:
    """Raise where writing would fail, or would replace something that is no report."""
    if not target.parent.is_dir():
        raise UserError(
            f"there is no directory {target.parent} to write {target.name} into",
            fix=f"mkdir -p {quote(str(target.parent))}, or write --to {quote(target.name)}",
        )
    if target.exists() and (why := _why_no_report(target)):
        raise UserError(
            f"{target} exists and is not a report, so it was not replaced",
            why=why,
            fix=f"write --to {quote(str(free_name(target)))}, or another new file",
        )


def _why_no_report(target: Path) -> str | None:
    try:
        with open_file(target) as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    return None if is_report(head) else "it was not written by this command"


def _write(runs: Sequence[RunRecord], target: Path, reload_s: float | None) -> int:
    # Names and messages come from files: half of a surrogate pair must not end the report.
    data = render_report(runs, time.time(), reload_s=reload_s).encode("utf-8", "replace")
    try:
        replace_file(target, data)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror}",
            fix="write --to FILE in a directory that you may write to",
            code=ExitCode.ENVIRONMENT,
        ) from error
    return len(data)
