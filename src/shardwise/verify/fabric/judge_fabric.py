"""Judge a fabric: each figure beside the one that its links should reach, slow pairs by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.collective_cost import Collective, bus_rate
from shardwise.units import format_bit_rate, format_bytes
from shardwise.verify.fabric.found import SOME_RANK, Found, GroupName, Pair, Point
from shardwise.verify.fabric.nccl_log import check_transports
from shardwise.verify.gates import Gate

Word = Literal["ok", "slow", "wrong data", "-"]
# gloo exchanges these two in one message each way, and the two ways slow each other down on their
# connection: it takes 1 to 2 times as long as in pieces (docs/LOG.md). Reductions are sent in
# pieces and are not affected.
_HALF_DUPLEX: frozenset[Collective] = frozenset({"all_gather", "all_to_all"})
_ON_ONE_CPU = "ranks on one CPU disturb each other"


@dataclass(frozen=True, slots=True)
class JudgedPoint:
    """A collective beside the bandwidth that it should reach."""

    point: Point
    expected: float
    """Bus bandwidth, bytes per second; 0 where nothing is known of the devices."""

    word: Word
    """`-` where it is not judged: small sizes show latency, not the links."""

    @property
    def share(self) -> float:
        """The share of the expected bandwidth."""
        return self.point.bus_rate / self.expected if self.expected else 0.0


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """A pair beside the bandwidth that it should reach."""

    pair: Pair
    expected: float
    """Bytes per second: what the links should carry, or more where other pairs reach more."""

    word: Word

    @property
    def share(self) -> float:
        """The share of the expected bandwidth."""
        return self.pair.rate / self.expected


@dataclass(frozen=True, slots=True)
class Judgement:
    """Everything that was found, with its verdicts."""

    points: tuple[JudgedPoint, ...]
    pairs: tuple[JudgedPair, ...]
    gates: tuple[Gate, ...]

    @property
    def failed(self) -> tuple[Gate, ...]:
        """The gates that were not passed."""
        return tuple(gate for gate in self.gates if gate.verdict == "fail")


def judge(found: Found, cluster: ClusterSpec, min_share: float) -> Judgement:
    """Each figure must reach `min_share` of what is expected."""
    points = tuple(_judge_point(point, found.points, cluster, min_share) for point in found.points)
    pairs = tuple(_judge_pair(pair, found.pairs, cluster, min_share) for pair in found.pairs)
    gates = [_data_gate(found)] if points or pairs else []
    for group in get_args(GroupName):
        own = [each for each in points if each.point.group == group]
        gates += [_group_gate(group, own, cluster, min_share)] if own else []
    for group in get_args(GroupName):
        ways = [each for each in pairs if each.pair.group == group]
        gates += [_pair_gate(group, ways, found.hosts, min_share)] if ways else []
    if found.transports is not None:
        gates += check_transports(found.transports, cluster)
    return Judgement(points, pairs, tuple(gates))


def group_words(group: GroupName, cluster: ClusterSpec) -> str:
    """The group as people call it."""
    if group == "all":
        return "all ranks"
    place = "node" if cluster.nvlink_domain == cluster.devices_per_node else "domain"
    return f"inside a {place}" if group == "inside" else f"between {place}s"


def pair_words(pair: Pair, hosts: Sequence[str]) -> str:
    """`rank 0 (a) -> rank 2 (b)`, of several flows the slowest."""
    flow = pair.slowest
    more = f", slowest of {len(pair.flows)} at once" if len(pair.flows) > 1 else ""
    return f"{_rank_words(flow.sender, hosts)} -> {_rank_words(flow.receiver, hosts)}{more}"


# ---- figures ---------------------------------------------------------------------------------


def _judge_point(
    point: Point, points: Sequence[Point], cluster: ClusterSpec, min_share: float
) -> JudgedPoint:
    expected = _expected_rate(point, cluster)
    largest = max(
        other.num_bytes
        for other in points
        if (other.group, other.kind) == (point.group, point.kind)
    )
    least = min_share / (2 if _is_half_duplex(point, cluster) else 1)
    word: Word = "ok" if point.bus_rate >= least * expected else "slow"
    if point.num_bytes < largest or _why_not_judged(point.group, cluster):
        word = "-"
    return JudgedPoint(point, expected, "wrong data" if point.wrong else word)


def _is_half_duplex(point: Point, cluster: ClusterSpec) -> bool:
    return cluster.fabric.library == "gloo" and point.kind in _HALF_DUPLEX


def _expected_rate(point: Point, cluster: ClusterSpec) -> float:
    if _is_unknown(cluster):
        return 0.0
    stride = cluster.nvlink_domain if point.group == "between" else 1
    seconds = cluster.fabric.seconds(point.kind, point.num_bytes, point.ranks, stride)
    return bus_rate(point.kind, point.num_bytes, point.ranks, seconds)


def _judge_pair(
    pair: Pair, pairs: Sequence[Pair], cluster: ClusterSpec, min_share: float
) -> JudgedPair:
    """Judge a pair by the other pairs; between domains also by the network's bandwidth.

    Inside a domain one message does not fill all links, so only the other pairs can tell.
    """
    expected = good_rate([other.rate for other in pairs if other.group == pair.group])
    if pair.group == "between" and not _is_unknown(cluster):
        expected = max(expected, cluster.fabric.between.bytes_per_s)
    word: Word = "ok" if pair.rate >= min_share * expected else "slow"
    if pair.group == "inside" and cluster.device == "cpu":
        word = "-"
    return JudgedPair(pair, expected, "wrong data" if any(f.wrong for f in pair.flows) else word)


def good_rate(rates: Sequence[float]) -> float:
    """The bandwidth of a good pair: the upper quartile, because one bad node spoils most pairs
    of three."""
    return sorted(rates)[-1 - len(rates) // 4]


def _why_not_judged(group: GroupName, cluster: ClusterSpec) -> str | None:
    """Why a fabric is not judged: ranks of one CPU have no links, and for an unknown device
    nothing is expected."""
    if group == "inside" and cluster.device == "cpu":
        return _ON_ONE_CPU
    if _is_unknown(cluster):
        return f"the catalogue has no {cluster.device_name}: name a GPU like it with --cluster"
    return None


def _is_unknown(cluster: ClusterSpec) -> bool:
    return cluster.device == "cuda" and cluster.gpu is None


# ---- gates -----------------------------------------------------------------------------------


def _data_gate(found: Found) -> Gate:
    wrong = [
        f"{_rank_words(rank, found.hosts)}: {count} wrong elements in {point.kind} of "
        f"{format_bytes(point.num_bytes)}"
        for point in found.points
        for rank, count in point.wrong
    ] + [
        f"{_rank_words(flow.receiver, found.hosts)}: {flow.wrong} wrong elements from "
        f"{_rank_words(flow.sender, found.hosts)}"
        for pair in found.pairs
        for flow in pair.flows
        if flow.wrong
    ]
    if not wrong:
        return Gate("data", "right", "right", "pass")
    more = f"; and {len(wrong) - 1} times more (--json has all)" if len(wrong) > 1 else ""
    advice = (
        f"{wrong[0]}{more}: memory, a link or a driver corrupts data; take the host out and test "
        "it with dcgmi diag -r 3"
    )
    return Gate("data", f"wrong {len(wrong)} times", "right", "fail", advice)


def _group_gate(
    group: GroupName, points: Sequence[JudgedPoint], cluster: ClusterSpec, min_share: float
) -> Gate:
    """The worst collective at its largest size."""
    name, bound = group_words(group, cluster), f"at least {min_share:.0%} of expected"
    judged = [each for each in points if each.word in ("ok", "slow")]
    if not judged:
        reason = _why_not_judged(group, cluster) or "its data is wrong"
        return Gate(name, "-", bound, "skip", reason)
    slow = [each for each in judged if each.word == "slow"]
    worst = min(slow or judged, key=lambda each: each.share)
    half = " (half is enough for gloo)" if _is_half_duplex(worst.point, cluster) else ""
    figure = f"{worst.point.kind} {worst.share:.0%}{half}"
    if not slow:
        return Gate(name, figure, bound, "pass")
    return Gate(name, figure, bound, "fail", _group_advice(group, cluster))


def _group_advice(group: GroupName, cluster: ClusterSpec) -> str:
    fabric = cluster.fabric
    if group == "inside":
        return f"{fabric.inside.name} should be faster: nvidia-smi topo -m, nvidia-smi nvlink -s"
    return (
        f"{fabric.between.name} should be faster: see the pairs below; for another network write "
        "cluster.interconnect=NAME, or a node's GB/s"
    )


def _pair_gate(
    group: GroupName, pairs: Sequence[JudgedPair], hosts: Sequence[str], min_share: float
) -> Gate:
    name, bound = f"pairs {group}", f"at least {min_share:.0%} of expected"
    judged = [each for each in pairs if each.word in ("ok", "slow")]
    if not judged:
        return Gate(name, "-", bound, "skip", _ON_ONE_CPU)
    slow = sorted((each for each in judged if each.word == "slow"), key=lambda each: each.share)
    if not slow:
        return Gate(name, f"{min(each.share for each in judged):.0%}", bound, "pass")
    figure = f"{len(slow)} of {len(judged)} slow"
    return Gate(name, figure, bound, "fail", _pair_advice(slow, hosts))


def _pair_advice(slow: Sequence[JudgedPair], hosts: Sequence[str]) -> str:
    """The slowest by name, and what the slow ones have in common."""
    worst = slow[0]
    words = (
        f"slowest: {pair_words(worst.pair, hosts)}, {format_bit_rate(worst.pair.rate)} of "
        f"{format_bit_rate(worst.expected)}"
    )
    common = set.intersection(*(_ends(each.pair, hosts) for each in slow))
    if len(slow) > 2 and len(common) == 1:
        return f"{words}; all slow pairs have {common.pop()}: its card, cable or switch port"
    return f"{words}; look at cards, cables and switch ports of both ends"


def _ends(pair: Pair, hosts: Sequence[str]) -> set[str]:
    """What may be the cause: a device inside a node, or a host between nodes."""
    ranks = (pair.slowest.sender, pair.slowest.receiver)
    if pair.group == "between":
        return {hosts[rank] for rank in ranks}
    return {_rank_words(rank, hosts) for rank in ranks}


def _rank_words(rank: int, hosts: Sequence[str]) -> str:
    return "a rank" if rank == SOME_RANK else f"rank {rank} ({hosts[rank]})"
