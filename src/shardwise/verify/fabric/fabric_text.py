"""A judged fabric as rows of tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.facts.cluster import ClusterSpec
from shardwise.units import format_bit_rate, format_bytes, format_rate
from shardwise.verify.fabric.found import Found
from shardwise.verify.fabric.judge_fabric import (
    JudgedPair,
    JudgedPoint,
    Judgement,
    group_words,
    pair_words,
)

Row = tuple[str, ...]
_SHOWN_PAIRS = 12


def headline(found: Found, cluster: ClusterSpec) -> str:
    """What was measured, and what it is compared with."""
    fabric = cluster.fabric
    parts = [f"inside {fabric.inside.name}"]
    if cluster.world_size > cluster.nvlink_domain:
        rate = format_rate(fabric.between.bytes_per_s)
        parts.append(f"between {fabric.between.name} ({rate} of data per node, one way)")
    ranks = f"{len(found.hosts)} ranks" if found.hosts else "the log"
    return f"{ranks} on {cluster.name}, {_library(cluster)}; expected: {', '.join(parts)}"


def tables(
    judgement: Judgement, found: Found, cluster: ClusterSpec
) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) of all that there is to show."""
    if judgement.points:
        yield "collectives; bandwidth of data, without headers", _point_rows(judgement, cluster)
    if judgement.pairs:
        yield "pairs of ranks, one way, the slowest first", _pair_rows(judgement, found)
    yield "gates", _gate_rows(judgement)


def to_json(judgement: Judgement, found: Found, cluster: ClusterSpec) -> dict[str, Any]:
    """Everything, for scripts; rates are bytes per second."""
    return {
        "cluster": cluster.name,
        "library": _library(cluster),
        "hosts": found.hosts,
        "collectives": [
            asdict(each.point)
            | {
                "algorithm_bytes_per_s": each.point.algorithm_rate,
                "bus_bytes_per_s": each.point.bus_rate,
                "expected_bytes_per_s": each.expected or None,
                "verdict": each.word,
            }
            for each in judgement.points
        ],
        "pairs": [
            asdict(each.pair)
            | {
                "bytes_per_s": each.pair.rate,
                "expected_bytes_per_s": each.expected,
                "verdict": each.word,
                "slowest": pair_words(each.pair, found.hosts),
            }
            for each in judgement.pairs
        ],
        "transports": found.transports.to_dict() if found.transports else None,
        "gates": [asdict(gate) for gate in judgement.gates],
        "passed": not judgement.failed,
    }


def _point_row(each: JudgedPoint, cluster: ClusterSpec) -> Row:
    point = each.point
    return (
        group_words(point.group, cluster),
        point.kind,
        str(point.ranks),
        format_bytes(point.num_bytes),
        _format_time(point.seconds),
        format_rate(point.algorithm_rate),
        format_rate(point.bus_rate),
        format_rate(each.expected) if each.expected else "-",
        f"{each.share:.0%}" if each.expected else "-",
        each.word,
    )


def _pair_row(each: JudgedPair, hosts: Sequence[str]) -> Row:
    return (
        pair_words(each.pair, hosts),
        format_rate(each.pair.rate),
        format_bit_rate(each.pair.rate),
        format_bit_rate(each.expected),
        f"{each.share:.0%}",
        each.word,
    )


def _library(cluster: ClusterSpec) -> str:
    """The ranks' communication library. An unknown GPU has no fabric to ask."""
    return "nccl" if cluster.device == "cuda" else "gloo"


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _point_rows(judgement: Judgement, cluster: ClusterSpec) -> list[Row]:
    head = ("group", "collective", "ranks", "size", "time", "algbw", "busbw", "expected", "", "")
    return [head, *(_point_row(each, cluster) for each in judgement.points)]


def _pair_rows(judgement: Judgement, found: Found) -> list[Row]:
    """The slowest pairs; of many pairs only some are shown."""
    ordered = sorted(judgement.pairs, key=lambda each: each.share)
    rows: list[Row] = [("from -> to", "rate", "", "expected", "", "")]
    for group in ("between", "inside"):
        own = [each for each in ordered if each.pair.group == group]
        rows += [_pair_row(each, found.hosts) for each in own[:_SHOWN_PAIRS]]
        if len(own) > _SHOWN_PAIRS:
            rows.append((f"and {len(own) - _SHOWN_PAIRS} faster ones {group}", *[""] * 5))
    return rows


def _gate_rows(judgement: Judgement) -> list[Row]:
    rows = [(g.name, g.figure, g.bound, g.verdict, g.advice) for g in judgement.gates]
    return [("gate", "figure", "bound", "verdict", ""), *rows]
