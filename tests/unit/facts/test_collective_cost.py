from __future__ import annotations

import json

import pytest

from shardwise.errors import UserError
from shardwise.facts.collective_cost import NETWORK_NAMES, Fabric, Link, fabric_of
from shardwise.facts.gpus import GPUS, find_gpu

NEAR = Link(name="near", bytes_per_s=100e9, hop_s=1e-6)
FAR = Link(name="far", bytes_per_s=40e9, hop_s=10e-6)
TWO_NODES = Fabric(inside=NEAR, between=FAR, domain=8)


def test_a_ring_inside_a_node_by_hand() -> None:
    # Seven hops, and seven eighths of 8 GB past every device.
    expected = 7 * 1e-6 + 7e9 / 100e9
    assert TWO_NODES.seconds("all_gather", 8e9, 8) == pytest.approx(expected)
    assert TWO_NODES.seconds("reduce_scatter", 8e9, 8) == pytest.approx(expected)
    assert TWO_NODES.seconds("all_reduce", 8e9, 8) == pytest.approx(2 * expected)


def test_one_rank_exchanges_nothing() -> None:
    assert TWO_NODES.seconds("all_reduce", 8e9, 1) == 0.0


def test_a_ring_through_all_ranks_has_the_cards_to_itself() -> None:
    expected = 15 * 10e-6 + 15e9 / 40e9
    assert TWO_NODES.seconds("all_gather", 16e9, 16) == pytest.approx(expected)


def test_groups_side_by_side_share_the_cards() -> None:
    # Eight groups of two, one member of each on a node: an eighth of the cards for each.
    alone = TWO_NODES.seconds("all_reduce", 1e9, 2, stride=8)
    assert alone == pytest.approx(2 * (10e-6 + 0.5e9 / (40e9 / 8)))


def test_strided_groups_inside_a_node_stay_on_its_links() -> None:
    assert TWO_NODES.seconds("all_gather", 1e9, 4, stride=2) < TWO_NODES.seconds(
        "all_gather", 1e9, 4, stride=4
    )


def test_a_rack_is_one_domain() -> None:
    gb200 = find_gpu("GB200")
    rack, node = fabric_of(gb200, 72), fabric_of(gb200, 4)
    assert rack.seconds("all_gather", 1e9, 64) < node.seconds("all_gather", 1e9, 64)


def test_cards_of_desktops_share_the_lanes_of_their_time() -> None:
    desktop, workstation = fabric_of(find_gpu("RTX-3090"), 2), fabric_of(find_gpu("RTX-4090"), 2)
    assert desktop.inside.bytes_per_s == workstation.inside.bytes_per_s / 4


def test_bridges_join_pairs_and_pcie_the_pairs() -> None:
    bridged = find_gpu("H100-NVL")
    assert fabric_of(bridged, 2).inside.name == "NVLink of H100-NVL"
    assert fabric_of(bridged, 8).inside.name == "PCIe"
    assert fabric_of(find_gpu("H100"), 64).inside.name == "NVLink of H100"


@pytest.mark.parametrize("name", NETWORK_NAMES)
def test_every_network_is_slower_than_the_links_inside(name: str) -> None:
    fabric = fabric_of(find_gpu("GB200"), 8, name)
    one_card = fabric.between.bytes_per_s / 8
    assert 0 < one_card < fabric.inside.bytes_per_s
    assert fabric.source == "given"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_has_links(gpu) -> None:
    fabric = fabric_of(gpu, 8)
    assert fabric.inside.bytes_per_s > 1e9
    assert fabric.between.bytes_per_s > 1e9
    assert fabric.source == "catalogue"


def test_a_number_is_a_nodes_gigabytes_per_second() -> None:
    assert fabric_of(find_gpu("H100"), 8, 50).between.bytes_per_s == 50e9


def test_an_unknown_network_names_the_near_ones() -> None:
    with pytest.raises(UserError, match="infiniband-nrd") as error:
        fabric_of(find_gpu("H100"), 8, "infiniband-nrd")
    assert "infiniband-ndr" in error.value.fix


def test_survives_json() -> None:
    fabric = fabric_of(find_gpu("H100"), 8, "efa-3200")
    assert Fabric.from_dict(json.loads(json.dumps(fabric.to_dict()))) == fabric
