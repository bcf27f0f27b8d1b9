"""Where every rank of a mesh sits: on which GPU of which node, and at which place of each axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.collective_cost import Fabric
from shardwise.plan.decisions import Decisions
from shardwise.plan.planned import Plan
from shardwise.plan.rank_share import num_expert_shards

# Neighbours along the first are neighbours in rank.
_FROM_INSIDE = ("tensor", "context", "shard", "pipeline", "replicate", "site")
_OWN_LETTERS = {"site": "i"}
_LETTERS = {name: _OWN_LETTERS.get(name, name[0]) for name in (*_FROM_INSIDE, "expert")}
_WIDTH = 80
# Of more nodes only the first ones and the last are drawn.
_MOST_NODES, _FIRST_NODES = 8, 3


@dataclass(frozen=True, slots=True)
class AxisPlace:
    """One axis laid onto the cluster."""

    name: str
    ranks: int
    stride: int
    """The distance between two neighbours of a group, in ranks."""

    link: str
    """What the slowest part of a group's ring goes over."""


def axis_places(decided: Decisions, fabric: Fabric) -> list[AxisPlace]:
    """Every axis that has more than one rank, from outside to inside; `expert` last, whose ranks
    are those of the others."""
    found, stride = [], 1
    for name in _FROM_INSIDE:
        ranks = getattr(decided, name)
        link = "the link between sites" if name == "site" else fabric.link_over(ranks, stride).name
        found.append(AxisPlace(name, ranks, stride, link))
        stride *= ranks
    found.reverse()
    found.append(AxisPlace("expert", decided.expert, 1, fabric.link_over(decided.expert, 1).name))
    return [place for place in found if place.ranks > 1]


def place_of(rank: int, decided: Decisions) -> dict[str, int]:
    """The coordinates of a rank, from outside to inside, and the part of the experts that it
    has."""
    left, place = rank, {}
    for name in _FROM_INSIDE:
        left, place[name] = divmod(left, getattr(decided, name))
    return {**dict(reversed(place.items())), "expert": rank % decided.expert}


def picture_lines(plan: Plan) -> list[str]:
    """The ranks of every node, at most 80 columns wide, and what each axis goes over."""
    decided, cluster = plan.decided, plan.cluster
    places = axis_places(decided, cluster.fabric)
    shown = [place.name for place in places]
    if not shown:
        return []
    letters = ", ".join(f"{_LETTERS[name]} {name}" for name in shown)
    return [
        f"ranks, one line for each node ({letters})",
        *_node_lines(decided, cluster, shown),
        *_axis_lines(decided, places),
    ]


def picture_data(plan: Plan) -> dict[str, Any]:
    """The same as data: every axis, and for every node the coordinates of its ranks."""
    decided, cluster = plan.decided, plan.cluster
    return {
        "axes": [
            {"name": each.name, "ranks": each.ranks, "stride": each.stride, "link": each.link}
            for each in axis_places(decided, cluster.fabric)
        ],
        "nodes": [
            [{"rank": rank, **place_of(rank, decided)} for rank in ranks]
            for ranks in _ranks_of_nodes(cluster)
        ],
    }


def _ranks_of_nodes(cluster: ClusterSpec) -> list[range]:
    size = cluster.devices_per_node
    return [range(node * size, (node + 1) * size) for node in range(cluster.num_nodes)]


def _node_lines(decided: Decisions, cluster: ClusterSpec, shown: list[str]) -> Iterator[str]:
    nodes = _ranks_of_nodes(cluster)
    left_out = range(_FIRST_NODES, len(nodes) - 1) if len(nodes) > _MOST_NODES else range(0)
    common = [name for name in shown if all(_is_same(name, ranks, decided) for ranks in nodes)]
    own = [name for name in shown if name not in common]
    width = len(_cell(nodes[-1][-1], decided, own))
    last_title = f"  node {len(nodes) - 1}  {_cell(nodes[-1][0], decided, common)}".rstrip()
    for number, ranks in enumerate(nodes):
        if number in left_out:
            if number == left_out[0]:
                yield f"  ... {len(left_out)} more nodes"
            continue
        title = f"  node {number:<{len(str(len(nodes) - 1))}}  {_cell(ranks[0], decided, common)}"
        cells = [_cell(rank, decided, own).ljust(width) for rank in ranks]
        yield from _rows(title.rstrip().ljust(len(last_title)), cells)


def _is_same(name: str, ranks: range, decided: Decisions) -> bool:
    """Whether all ranks of a node are at one place of an axis."""
    return len({place_of(rank, decided)[name] for rank in ranks}) == 1


def _rows(title: str, cells: list[str]) -> Iterator[str]:
    """The ranks of one node, in as many equal rows as 80 columns need."""
    room = max(1, (_WIDTH - len(title) - 1) // (len(cells[0]) + 1))
    in_row = next(
        size for size in range(len(cells), 0, -1) if len(cells) % size == 0 and size <= room
    )
    for start in range(0, len(cells), in_row):
        row = " ".join(cells[start : start + in_row])
        yield f"{title if start == 0 else ' ' * len(title)}  {row}".rstrip()


def _cell(rank: int, decided: Decisions, shown: list[str]) -> str:
    place = place_of(rank, decided)
    return "".join(f"{_LETTERS[name]}{place[name]}" for name in shown)


def _axis_lines(decided: Decisions, places: list[AxisPlace]) -> Iterator[str]:
    width = max(len(place.name) for place in places)
    for place in places:
        apart = "neighbours" if place.stride == 1 else f"every {place.stride} ranks"
        more = ""
        if place.name == "expert":
            shards = num_expert_shards(decided)
            more = f", each part sharded over {shards}" if shards > 1 else ", each part whole"
        yield f"  {place.name:<{width}}  {place.ranks} {apart}, over {place.link}{more}"
