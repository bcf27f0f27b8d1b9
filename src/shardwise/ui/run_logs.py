"""The logs of a run: of one rank, or of all of them by time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.files import read_tail
from shardwise.platforms.rank_logs import merged_lines, newest_attempt, rank_files
from shardwise.report.collect import RunRecord
from shardwise.report.html import side_by_side
from shardwise.report.markup import Html, tag
from shardwise.report.page import section
from shardwise.ui.follow import Newest, Stamp, stamp_of

ALL = "all"
_TAIL_BYTES = 2**16
_MOST_LINES = 200
# Colours of a terminal.
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Logs:
    """The ends of logs. What has not changed is not read again."""

    def __init__(self) -> None:
        self._shown: Newest[tuple[Stamp, list[str]]] = Newest()

    def draw(self, runs: Sequence[RunRecord], rank: str) -> Html:
        """The last lines of one rank of every run."""
        found = [(run, self._lines(run, rank)) for run in runs]
        shown = [(run, tag("pre", "\n".join(lines), class_="log")) for run, lines in found]
        return section("log", "Log", side_by_side(shown))

    def _lines(self, run: RunRecord, rank: str) -> list[str]:
        files = _files_of(run)
        if not files:
            return ["no rank has written a log yet"]
        wanted = files if rank == ALL else _only(files, rank)
        if not wanted:
            return [f"there is no log of rank {rank} here"]
        stamp = stamp_of(iter(wanted.values()))
        key = f"{run.path} {rank}"
        known, lines = self._shown.kept(key, lambda: ((), []))
        if known != stamp:
            lines = _all_lines(run) if rank == ALL else _tail(*wanted.values())
            self._shown[key] = (stamp, lines)
        return lines


def draw_choice(runs: Sequence[RunRecord], rank: str) -> Html:
    """A list of the ranks whose logs are here."""
    ranks = sorted({each for run in runs for each in _files_of(run)})
    names = [(str(each), f"rank {each}") for each in ranks] + [(ALL, "all ranks, by time")]
    options = [
        tag("option", name, value=value, selected="" if value == rank else None)
        for value, name in names
    ]
    chosen = tag("select", *options, name="rank", id="rank")
    return tag("p", tag("label", "log of ", chosen), class_="controls")


def _files_of(run: RunRecord) -> dict[int, Path]:
    try:
        attempt = newest_attempt(run.path)
        return {} if attempt is None else rank_files(attempt)
    except OSError:
        return {}


def _only(files: dict[int, Path], rank: str) -> dict[int, Path]:
    """The log of one rank; without a name of the first."""
    wanted = int(rank) if rank else min(files)
    return {wanted: files[wanted]} if wanted in files else {}


def _all_lines(run: RunRecord) -> list[str]:
    try:
        attempt = newest_attempt(run.path)
        lines = [] if attempt is None else merged_lines(attempt, run.events)
    except OSError as error:
        return [f"the logs cannot be read: {error.strerror}"]
    return [str(replace(line, text=_plain(line.text))) for line in lines[-_MOST_LINES:]]


def _tail(path: Path) -> list[str]:
    try:
        text = read_tail(path, _TAIL_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return [f"{path.name} cannot be read: {error.strerror}"]
    return [_plain(line) for line in text.split("\n")[-_MOST_LINES - 1 :]]


def _plain(line: str) -> str:
    """A line without colours; of one that was drawn over itself, as bars are, the last state."""
    return _COLOUR.sub("", line).rstrip("\r").rpartition("\r")[2].expandtabs()
