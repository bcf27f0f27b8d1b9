"""What the page shows now, in parts that are sent only where they have changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from shardwise.errors import UserError
from shardwise.report.collect import RunRecord
from shardwise.report.html import headlines_of, names_of, sections_of
from shardwise.report.markup import Html, tag
from shardwise.report.plots import NUM_COLOURS
from shardwise.ui.follow import Newest, RunsFolder
from shardwise.ui.overview import Overview, ago, state_in_words
from shardwise.ui.run_logs import ALL, Logs, draw_choice

# A line is 360 pixels wide, and a live page draws it again and again.
MAX_POINTS = 300
MOST_RUNS = NUM_COLOURS


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a browser asks for."""

    runs: tuple[str, ...] = ()
    rank: str = ""
    have: Collection[str] = ()
    """The digests of parts that it shows already."""

    def __post_init__(self) -> None:
        if len(self.runs) > MOST_RUNS:
            raise UserError(f"at most {MOST_RUNS} runs are compared at once: unmark another")
        # Python converts no number of thousands of digits.
        if self.rank not in ("", ALL) and not (self.rank.isdecimal() and len(self.rank) < 10):
            raise UserError(f"{self.rank!r} is no rank; a rank is a number, or {ALL}")


@dataclass(frozen=True, slots=True)
class PageFragment:
    """One part of the page."""

    name: str
    html: Html

    @property
    def digest(self) -> str:
        """What tells it from another state of the same part."""
        return hashlib.sha256(f"{self.name}\0{self.html}".encode("utf-8", "replace")).hexdigest()[
            :16
        ]


@dataclass(frozen=True, slots=True)
class _Drawn:
    runs: tuple[RunRecord, ...]
    states: tuple[str, ...]
    parts: tuple[PageFragment, ...]


class View:
    """The parts of the page over one folder."""

    def __init__(self, folder: RunsFolder, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._overview = Overview(folder)
        self._logs = Logs()
        self._drawn: Newest[_Drawn] = Newest()

    def answer(self, wanted: Wanted) -> list[dict[str, str]]:
        """Every part by its name and digest, with its HTML where the browser has another."""
        have = frozenset(wanted.have)
        return [
            {"name": part.name, "digest": part.digest}
            | ({} if part.digest in have else {"html": part.html})
            for part in self._parts(wanted)
        ]

    def _parts(self, wanted: Wanted) -> Iterator[PageFragment]:
        now = self._clock()
        yield PageFragment("runs", self._overview.draw(now))
        found = {name: self._folder.run(name) for name in dict.fromkeys(wanted.runs)}
        for name, run in found.items():
            if run is None:
                yield PageFragment(
                    f"gone-{name}", tag("p", f"there is no run {name}", class_="alert")
                )
        runs = tuple(run for run in found.values() if run is not None)
        if not runs:
            return
        states = tuple(state_in_words(run, now) for run in runs)
        yield PageFragment("names", _header(runs, states, now))
        for part in self._sections(runs, states):
            yield part
            if part.name == "plots":
                yield PageFragment("rank-of-log", draw_choice(runs, wanted.rank))
                yield PageFragment("log", self._logs.draw(runs, wanted.rank))

    def _sections(
        self, runs: tuple[RunRecord, ...], states: tuple[str, ...]
    ) -> tuple[PageFragment, ...]:
        """What the report shows too. It is drawn again only where a run has changed."""
        key = "\0".join(run.name for run in runs)
        drawn = self._drawn.kept(key, lambda: _draw(runs, states))
        is_same = all(one is other for one, other in zip(drawn.runs, runs, strict=True))
        if not is_same or drawn.states != states:
            self._drawn[key] = drawn = _draw(runs, states)
        return drawn.parts


def _draw(runs: tuple[RunRecord, ...], states: tuple[str, ...]) -> _Drawn:
    parts = tuple(
        PageFragment(name, drawn) for name, drawn in sections_of(runs, states, MAX_POINTS)
    )
    return _Drawn(runs, states, parts)


def _header(runs: Sequence[RunRecord], states: Sequence[str], now: float) -> Html:
    lines = [
        tag("p", f"{run.name}: {state}; last event {ago(run, now)}", class_="live")
        for run, state in zip(runs, states, strict=True)
    ]
    return tag("div", tag("h2", *names_of(runs)), *lines, *headlines_of(runs))
