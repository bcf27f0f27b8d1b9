"""Where ranks stand on a mesh, and with whom they work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from shardwise.config.plain import config_from_dict
from shardwise.errors import ExitCode, UserError
from shardwise.launch.prepare import choose_plan
from shardwise.parallel.axes import AXES, FACTORS, Axes
from shardwise.parallel.mesh import Mesh, World, build_mesh, lay_out
from shardwise.plan.axis_sizes import SUPPORTED, validate_supported
from shardwise.plan.planned import Plan
from shardwise.tunnel.world import rank_zero_of

ALL = Axes(site=2, replicate=2, pipeline=2, shard=2, context=2, tensor=2, expert=4)


def test_every_rank_has_a_place_of_its_own() -> None:
    assert ALL.num_ranks == 64
    places = [tuple(ALL.place(rank)[name] for name in FACTORS) for rank in range(64)]
    # In the order of the ranks: the last axis has neighbours.
    assert places == sorted(set(places)) and len(places) == 64
    assert [ALL.index(rank, *FACTORS) for rank in range(64)] == list(range(64))


def test_experts_have_no_ranks_of_their_own() -> None:
    assert replace(ALL, expert=1).num_ranks == ALL.num_ranks
    assert set(AXES) - set(FACTORS) == {"expert"}


@pytest.mark.parametrize("name", FACTORS)
def test_ranks_along_an_axis_differ_in_nothing_else(name: str) -> None:
    for rank in (0, 21, 63):
        along = ALL.ranks_along(rank, name)
        assert rank in along and len(along) == 2
        first, second = (ALL.place(each) for each in along)
        assert {axis for axis in FACTORS if first[axis] != second[axis]} == {name}


@pytest.fixture
def mesh_of() -> Iterator[Callable[[Axes], Mesh]]:
    """Rank 0's mesh, in a world without the other ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_RANK", raising=False)
        worlds = []

        def make(axes: Axes) -> Mesh:
            worlds.append(rank_zero_of(axes.num_ranks))
            worlds[-1].__enter__()
            return lay_out(axes, World.joined(), "cpu")

        yield make
        for world in worlds:
            world.__exit__(None, None, None)


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def test_data_parallel_ranks_read_all_and_reduce_all(mesh_of: Callable[[Axes], Mesh]) -> None:
    mesh = mesh_of(Axes(replicate=2, shard=3))
    assert mesh.devices.mesh_dim_names == ("replicate", "shard")
    assert (mesh.data_rank, mesh.data_degree) == (0, 6)
    assert mesh.batch_ranks == (0,) and mesh.counts_batch
    # No group beside the world's has to be made for what all ranks do.
    assert mesh.loss_group is mesh.token_group is mesh.step_group is mesh.world.group
    assert mesh.replicas is not None and ranks_of(mesh.replicas) == [0, 3]
    assert mesh.group("tensor") is None


def test_one_axis_gives_a_mesh_of_one(mesh_of: Callable[[Axes], Mesh]) -> None:
    mesh = mesh_of(Axes(shard=4))
    assert mesh.devices.mesh_dim_names == ("shard",) and mesh.replicas is None


def test_ranks_of_a_batch_count_once_and_sites_step_apart(
    mesh_of: Callable[[Axes], Mesh],
) -> None:
    mesh = mesh_of(replace(ALL, expert=1))
    assert mesh.data_degree == 8
    assert mesh.batch_ranks == ALL.ranks_along(0, "pipeline", "context", "tensor")
    assert len(mesh.batch_ranks) == 8
    assert ranks_of(mesh.loss_group) == [
        *ALL.ranks_along(0, "replicate", "pipeline", "shard", "context")
    ]
    assert ranks_of(mesh.token_group) == [*ALL.ranks_along(0, "replicate", "shard", "context")]
    assert ranks_of(mesh.step_group) == list(range(32))
    by_data: dict[int, list[bool]] = {}
    for rank in range(64):
        there = replace(mesh, world=replace(mesh.world, rank=rank))
        by_data.setdefault(there.data_rank, []).append(there.counts_batch)
    assert sorted(by_data) == list(range(8))
    assert all(len(counts) == 8 and sum(counts) == 1 for counts in by_data.values())


def test_fsdp_shards_over_context_and_leaves_tensor_alone(
    mesh_of: Callable[[Axes], Mesh],
) -> None:
    mesh = mesh_of(Axes(replicate=2, shard=2, context=2, tensor=2))
    assert mesh.devices.mesh_dim_names == ("replicate", "shard", "tensor")
    assert mesh.fsdp.mesh_dim_names == ("replicate", "shard")
    assert mesh.fsdp.mesh.tolist() == [[0, 2, 4, 6], [8, 10, 12, 14]]
    along = {name: ranks_of(group) for name, group in mesh.axis_groups.items()}
    assert along == {"replicate": [0, 8], "shard": [0, 4], "context": [0, 2], "tensor": [0, 1]}
    assert mesh.clip_group is mesh.step_group is mesh.world.group
    assert mesh.experts is None and mesh.fsdp_over_experts is mesh.fsdp


def test_experts_are_dealt_out_to_neighbours(mesh_of: Callable[[Axes], Mesh]) -> None:
    mesh = mesh_of(Axes(replicate=2, shard=2, tensor=2, expert=2))
    assert mesh.experts is not None
    assert mesh.experts.mesh_dim_names == ("replicate", "shard", "expert")
    assert mesh.fsdp_over_experts.mesh.tolist() == [[0, 2], [4, 6]]
    assert ranks_of(mesh.axis_groups["expert"]) == [0, 1]


def test_a_rank_alone_on_the_axes_of_a_loss_has_a_group_of_one(
    mesh_of: Callable[[Axes], Mesh],
) -> None:
    mesh = mesh_of(Axes(tensor=2))
    assert ranks_of(mesh.loss_group) == [0] and ranks_of(mesh.step_group) == [0, 1]


@pytest.mark.parametrize("name", [name for name in AXES if name not in SUPPORTED])
def test_an_axis_that_nothing_can_use_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"2 ranks along `{name}`, which is not supported") as found:
        validate_supported({name: 2})
    assert found.value.code == ExitCode.CONFIG and "mesh.shard=auto" in found.value.fix


def plan_of(cluster: str) -> Plan:
    sections = {"model": {"name": "tiny-llama"}, "cluster": {"name": cluster}}
    return choose_plan(config_from_dict(sections), environ={})


def test_a_mesh_is_refused_in_a_world_of_another_size() -> None:
    with rank_zero_of(3), pytest.raises(UserError, match="for 2 ranks, but 3 were started"):
        build_mesh(plan_of("2xCPU"))


def test_the_launcher_says_which_rank_is_the_first_of_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rank_zero_of(2):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        assert World.joined().is_first_of_node
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert not World.joined().is_first_of_node and World.joined().is_first


def test_without_a_process_group_there_is_no_world() -> None:
    with pytest.raises(RuntimeError, match="join one first"):
        World.joined()
