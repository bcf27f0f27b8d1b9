"""Read the output of nccl-tests, so that it goes through the same gates."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.errors import UserError
from shardwise.facts.collective_cost import Collective
from shardwise.verify.fabric.found import SOME_RANK, Found, GroupName, Point

_BINARIES: dict[str, Collective] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}
_BINARY = re.compile(r"(\w+)_perf")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device")
# size count type redop root, then twice: time algbw busbw #wrong. Old versions leave redop or root
# out where a collective has none, so both tables are found from the end of the line.
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+[a-z]\S*\s")
_COLUMNS = 4


def read_nccl_tests(text: str, name: str) -> Found:
    """The table of one binary. The file's `name` may have to say which binary it was."""
    hosts = {int(match[1]): match[2] for match in map(_RANK.match, text.splitlines()) if match}
    if len(hosts) < 2:
        raise UserError(
            f"{name} does not list the ranks of nccl-tests",
            why="the lines `#  Rank  0 Group  0 Pid ... on HOST device ...` tell how many there "
            f"were, and {len(hosts)} were found",
            fix="keep the whole output: all_reduce_perf ... > all_reduce_perf.txt",
        )
    ordered = tuple(hosts[rank] for rank in sorted(hosts))
    kind, group = _kind(text, name), _group(ordered)
    points = tuple(_points(text, kind, group, len(hosts)))
    if not points:
        raise UserError(f"{name} holds no results", fix="run the binary to its end")
    return Found(hosts=ordered, points=points)


def _kind(text: str, name: str) -> Collective:
    """The collective, by the program's name. Old versions leave it to the file's name."""
    for word in _BINARY.findall(f"{text}\n{name}"):
        if word in _BINARIES:
            return _BINARIES[word]
    raise UserError(
        f"{name} does not say which collective it shows",
        why="older nccl-tests do not print their name; shardwise reads " + ", ".join(_BINARIES),
        fix="name the file after its binary, such as all_reduce_perf.txt",
    )


def _group(hosts: tuple[str, ...]) -> GroupName:
    distinct = len(set(hosts))
    if distinct == 1:
        return "inside"
    return "between" if distinct == len(hosts) else "all"


def _points(text: str, kind: Collective, group: GroupName, ranks: int) -> Iterator[Point]:
    """One point for every row: the slower of out-of-place and in-place."""
    for line in text.splitlines():
        match, words = _ROW.match(line), line.split()
        if match is None or len(words) < 3 + 2 * _COLUMNS:
            continue
        tables = (words[-2 * _COLUMNS : -_COLUMNS], words[-_COLUMNS:])
        seconds = max(float(table[0]) for table in tables) / 1e6
        wrong = sum(_count(table[-1]) for table in tables)
        bad = ((SOME_RANK, wrong),) if wrong else ()
        if seconds > 0 and int(match[1]) > 0:
            yield Point(group, kind, ranks, int(match[1]), seconds, bad)


def _count(word: str) -> int:
    """`N/A` where a test was not asked to check."""
    return int(float(word)) if word[0].isdigit() else 0
