"""The mesh as a picture of ranks, and as data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.parallel.axes import Axes
from shardwise.plan import axis_sizes
from shardwise.plan.decisions import Decisions
from shardwise.plan.picture import picture_data, picture_lines, place_of
from shardwise.plan.planned import Plan

MakePlan = Callable[..., Plan]


@pytest.fixture
def plan_with(monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    names = ("site", "replicate", "shard", "tensor", "context", "expert")
    monkeypatch.setattr(axis_sizes, "SUPPORTED", names)

    def make(*settings: str) -> Plan:
        return choose_plan(load_config(None, ["data.seq_len=4096", *settings]), environ={})

    return make


def test_each_node_is_a_line_and_each_axis_says_its_links(plan_with: MakePlan) -> None:
    plan = plan_with(
        *("model.name=llama-3.1-8b", "cluster.name=4x8xH100"),
        *("mesh.replicate=4", "mesh.shard=4", "mesh.tensor=2", "memory.offload=cpu"),
    )
    assert picture_lines(plan) == [
        "ranks, one line for each node (r replicate, s shard, t tensor)",
        "  node 0  r0  s0t0 s0t1 s1t0 s1t1 s2t0 s2t1 s3t0 s3t1",
        "  node 1  r1  s0t0 s0t1 s1t0 s1t1 s2t0 s2t1 s3t0 s3t1",
        "  node 2  r2  s0t0 s0t1 s1t0 s1t1 s2t0 s2t1 s3t0 s3t1",
        "  node 3  r3  s0t0 s0t1 s1t0 s1t1 s2t0 s2t1 s3t0 s3t1",
        "  replicate  4 every 8 ranks, over infiniband-ndr",
        "  shard      4 every 2 ranks, over NVLink of H100",
        "  tensor     2 neighbours, over NVLink of H100",
    ]


@pytest.mark.parametrize(
    "settings",
    [
        ("cluster.name=64x8xH100", "mesh.shard=32", "mesh.context=2", "mesh.tensor=8"),
        ("cluster.name=16xA100-40GB", "mesh.shard=16", "mesh.expert=4"),
        ("cluster.name=18x4xGB200", "mesh.shard=36", "mesh.context=2"),
    ],
)
def test_a_picture_fits_80_columns(plan_with: MakePlan, settings: tuple[str, ...]) -> None:
    plan = plan_with("model.name=mixtral-8x7b", "memory.offload=cpu", "mesh.replicate=1", *settings)
    lines = picture_lines(plan)
    assert max(map(len, lines)) <= 80
    nodes = [line for line in lines if line.startswith("  node")]
    assert len(nodes) == min(4, plan.cluster.num_nodes)


def test_a_rank_alone_needs_no_picture(plan_with: MakePlan) -> None:
    plan = plan_with("model.name=llama-3.2-1b", "cluster.name=1xH100")
    assert picture_lines(plan) == []
    assert picture_data(plan)["axes"] == []


def test_a_place_is_that_of_the_mesh_which_ranks_build() -> None:
    sizes = {"pipeline": 2, "shard": 4, "context": 2, "tensor": 2, "expert": 4}
    mesh, decided = Axes(**sizes), Decisions(**sizes)
    for rank in range(32):
        place, drawn = mesh.place(rank), place_of(rank, decided)
        assert drawn.pop("expert") == rank % 4
        assert drawn == {name: place[name] for name in drawn}
        assert [*drawn] == ["site", "replicate", "pipeline", "shard", "context", "tensor"]


def test_sites_are_drawn_outside_of_their_meshes(plan_with: MakePlan) -> None:
    words = ("model.name=llama-3.1-8b", "cluster.name=4x2xH100", "memory.offload=none")
    lines = picture_lines(plan_with(*words, "mesh.site=2", "mesh.shard=4", "mesh.replicate=1"))
    assert lines[0] == "ranks, one line for each node (i site, s shard)"
    assert lines[1:5] == [
        "  node 0  i0  s0 s1",
        "  node 1  i0  s2 s3",
        "  node 2  i1  s0 s1",
        "  node 3  i1  s2 s3",
    ]
    assert "site   2 every 4 ranks, over the link between sites" in lines[5]


def test_the_command_draws_it_and_gives_it_as_data(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: llama-3.1-8b\ncluster: 2x8xH100\n")

    def show(*words: str) -> str:
        return CliRunner().invoke(app, ["plan", str(file), *words], catch_exceptions=False).stdout

    assert "ranks, one line for each node" in show()
    mesh = json.loads(show("--json"))["mesh"]
    assert [rank["rank"] for rank in mesh["nodes"][1]] == list(range(8, 16))
    assert {axis["name"] for axis in mesh["axes"]} <= {"replicate", "shard"}
