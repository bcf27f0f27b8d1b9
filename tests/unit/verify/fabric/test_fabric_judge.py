"""A fabric that does what it should passes; whatever is slow or wrong is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.config.schema import ClusterConfig
from shardwise.facts.cluster import ClusterSpec, parse_cluster, resolve_cluster
from shardwise.facts.collective_cost import Collective, bus_rate
from shardwise.units import GIB, MIB
from shardwise.verify.fabric.fabric_text import tables, to_json
from shardwise.verify.fabric.found import KINDS, Flow, Found, GroupName, Pair, Point
from shardwise.verify.fabric.judge_fabric import Judgement, judge
from shardwise.verify.gates import Gate

H100 = parse_cluster("2x8xH100")
SPANS: dict[GroupName, tuple[int, int]] = {"inside": (8, 1), "between": (2, 8), "all": (16, 1)}


def point(group: GroupName, kind: Collective, speed: float, size: int = GIB) -> Point:
    """As fast as expected, times `speed`."""
    ranks, stride = SPANS[group]
    return Point(group, kind, ranks, size, H100.fabric.seconds(kind, size, ranks, stride) / speed)


def pairs(**slow: float) -> tuple[Pair, ...]:
    """Both ways between two nodes of eight, and inside them; `slow` is `rank_rank=speed`."""
    card = H100.fabric.between.bytes_per_s / 8

    def flow(a: int, b: int, rate: float) -> Flow:
        return Flow(a, b, GIB / rate / slow.get(f"r{a}_{b}", 1.0))

    ways = [(0, 1), (1, 0)]
    between = [tuple(flow(8 * a + i, 8 * b + i, card) for i in range(8)) for a, b in ways]
    inside = [(flow(a, b, 300e9),) for a in range(8) for b in range(8) if a != b]
    return (
        *(Pair("between", GIB, flows) for flows in between),
        *(Pair("inside", GIB, flows) for flows in inside),
    )


def found(**changes: Any) -> Found:
    points = tuple(point(group, kind, 1.0) for group in SPANS for kind in KINDS)
    hosts = ("alpha",) * 8 + ("beta",) * 8
    return replace(Found(hosts=hosts, points=points, pairs=pairs()), **changes)


def failing(judgement: Judgement) -> dict[str, Gate]:
    return {gate.name: gate for gate in judgement.failed}


def test_a_good_fabric_passes_every_gate() -> None:
    judgement = judge(found(), H100, 0.8)
    assert [gate.verdict for gate in judgement.gates] == ["pass"] * 6
    assert all(each.share == pytest.approx(1.0) for each in judgement.points)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_rate("all_reduce", 8e9, 8, 1.0) == pytest.approx(14e9)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_rate(kind, 8e9, 8, 1.0) == pytest.approx(7e9)  # type: ignore[arg-type]
    assert Point("all", "all_reduce", 8, 8_000_000_000, 2.0).algorithm_rate == pytest.approx(4e9)


def test_an_all_to_all_between_nodes_shares_the_cards() -> None:
    """Half of 1 GiB leaves each of 8 devices of a node, over cards of 360 GB/s."""
    seconds = H100.fabric.seconds("all_to_all", GIB, 16)
    assert seconds == pytest.approx(GIB / 2 * 8 / 360e9, rel=0.1)


def test_a_slow_collective_fails_its_group_alone() -> None:
    points = [point(group, kind, 1.0) for group in SPANS for kind in KINDS]
    points[2] = point("inside", "all_reduce", 0.5)
    gates = failing(judge(found(points=tuple(points)), H100, 0.8))
    assert set(gates) == {"inside a node"}
    assert gates["inside a node"].figure == "all_reduce 50%"
    assert "NVLink of H100" in gates["inside a node"].advice
    assert not failing(judge(found(points=tuple(points)), H100, 0.4))


def test_small_sizes_are_shown_and_not_judged() -> None:
    points = (point("all", "all_gather", 0.1, MIB), point("all", "all_gather", 1.0))
    judgement = judge(found(points=points), H100, 0.8)
    assert [each.word for each in judgement.points] == ["-", "ok"]


def test_wrong_data_fails_and_names_the_rank_however_fast_it_was() -> None:
    bad = replace(point("all", "all_gather", 1.0), wrong=((5, 12),))
    gates = failing(judge(found(points=(bad,)), H100, 0.8))
    assert set(gates) == {"data"}
    assert gates["data"].figure == "wrong 1 times"
    assert "rank 5 (alpha): 12 wrong elements in all_gather of 1.0 GiB" in gates["data"].advice
    flow = Pair("inside", GIB, (Flow(2, 3, 0.003, wrong=1),))
    gates = failing(judge(found(pairs=(flow, *pairs())), H100, 0.8))
    assert "rank 3 (alpha): 1 wrong elements from rank 2 (alpha)" in gates["data"].advice


def test_one_slow_card_is_named_by_ranks_and_hosts() -> None:
    gates = failing(judge(found(pairs=pairs(r11_3=0.5)), H100, 0.8))
    assert set(gates) == {"pairs between"}
    gate = gates["pairs between"]
    assert gate.figure == "1 of 2 slow"
    assert "rank 11 (beta) -> rank 3 (alpha), slowest of 8 at once" in gate.advice
    assert "1440.00 Gbit/s of 2880.00 Gbit/s" in gate.advice


def test_a_bad_gpu_is_what_its_slow_pairs_have_in_common() -> None:
    slow = {f"r{a}_{b}": 0.3 for a in range(8) for b in range(8) if 5 in (a, b)}
    gate = failing(judge(found(pairs=pairs(**slow)), H100, 0.8))["pairs inside"]
    assert gate.figure == "14 of 56 slow"
    assert "all slow pairs have rank 5 (alpha)" in gate.advice


def test_a_bad_node_is_what_its_slow_pairs_have_in_common() -> None:
    hosts, rate = ("a", "b", "c", "d"), H100.fabric.between.bytes_per_s
    ways = [(x, y) for x in range(4) for y in range(4) if x != y]
    seen = tuple(
        Pair("between", GIB, (Flow(x, y, GIB / rate / (0.5 if 2 in (x, y) else 1)),))
        for x, y in ways
    )
    gate = failing(judge(Found(hosts=hosts, pairs=seen), parse_cluster("4x1xH100"), 0.8))
    assert gate["pairs between"].figure == "6 of 12 slow"
    assert "all slow pairs have c: its card, cable or switch port" in gate["pairs between"].advice


def test_the_only_pair_is_held_against_the_network() -> None:
    """Two nodes on CPUs: nothing but `cluster.interconnect` can tell."""
    config = ClusterConfig(name="2x2xCPU", interconnect=0.125)
    cluster = resolve_cluster(config, {})
    both = tuple(
        Pair("between", MIB, (Flow(a, b, MIB / 12e6), Flow(a + 1, b + 1, MIB / 12e6)))
        for a, b in ((0, 2), (2, 0))
    )
    inside = Pair("inside", MIB, (Flow(0, 1, 1.0),))
    seen = Found(hosts=("a", "a", "b", "b"), pairs=(*both, inside))
    judgement = judge(seen, cluster, 0.8)
    assert [each.word for each in judgement.pairs] == ["slow", "slow", "-"]
    gates = failing(judgement)
    assert set(gates) == {"pairs between"}
    assert "rank 0 (a) -> rank 2 (b)" in gates["pairs between"].advice
    assert "192 Mbit/s of 956 Mbit/s" in gates["pairs between"].advice
    good = resolve_cluster(replace(config, interconnect=0.025), {})
    assert not failing(judge(seen, good, 0.8))


def test_gloo_may_take_twice_as_long_for_what_it_sends_in_one_piece() -> None:
    cluster = resolve_cluster(ClusterConfig(name="2x2xCPU", interconnect=0.125), {})

    def at_half_speed(kind: Collective) -> Point:
        return Point("between", kind, 2, MIB, 2 * cluster.fabric.seconds(kind, MIB, 2, 2))

    judgement = judge(Found(points=tuple(map(at_half_speed, KINDS))), cluster, 0.8)
    assert [each.word for each in judgement.points] == ["ok", "slow", "slow", "ok"]
    gathered = judge(Found(points=(at_half_speed("all_gather"),)), cluster, 0.8)
    assert gathered.gates[1].figure == "all_gather 50% (half is enough for gloo)"
    assert gathered.gates[1].verdict == "pass"


def unknown_gpus() -> ClusterSpec:
    return replace(H100, gpu=None, device_name="Tachyon 9000")


def test_of_an_unknown_gpu_nothing_is_expected_but_equal_pairs() -> None:
    judgement = judge(found(pairs=pairs(r0_8=0.2)), unknown_gpus(), 0.8)
    skipped = [gate for gate in judgement.gates if gate.verdict == "skip"]
    assert len(skipped) == 3
    assert "no Tachyon 9000" in skipped[0].advice
    assert set(failing(judgement)) == {"pairs between"}


def test_all_of_it_is_shown_and_travels_as_json() -> None:
    seen = found(pairs=pairs(r11_3=0.5))
    assert Found.from_dict(seen.to_dict()) == seen
    judgement = judge(seen, H100, 0.8)
    shown = {title: rows for title, rows in tables(judgement, seen, H100)}
    assert [len(rows) for rows in shown.values()] == [13, 1 + 2 + 12 + 1, 7]
    for rows in shown.values():
        assert len({len(row) for row in rows}) == 1
    data = to_json(judgement, seen, H100)
    assert data["passed"] is False
    assert len(data["pairs"]) == 58
