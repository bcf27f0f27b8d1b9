"""A report on the disk: written whole or not at all, and repeatedly while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shardwise.report.collect import RunRecord, collect_runs
from shardwise.report.html import REPORT, render_report
from shardwise.report.page_file import write_page


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


def _write(runs: Sequence[RunRecord], target: Path, reload_s: float | None) -> int:
    return write_page(REPORT, render_report(runs, time.time(), reload_s=reload_s), target)
