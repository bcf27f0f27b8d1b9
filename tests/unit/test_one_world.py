"""Only the mesh and the launcher know torch's world: all others ask a Mesh or a World.

A collective that leaves its group out runs over the world too, so it has to name one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise

SOURCE = Path(shardwise.__file__).parent
# The launcher makes the world, and the mesh tells the others of it.
KNOW = ("parallel/mesh.py", "launch/")
# The planner has no world yet: it computes with the size that a world would have. So do those who
# write jobs of a plan and look at it before a rank starts. These rooms only show or compare it.
PLAN = (
    *("config/", "facts/", "plan/", "report/", "cli/", "tunnel/", "verify/", "calibrate/"),
    *("doctor/", "platforms/", "compare/", "migrate/"),
)
ASKED = {"get_rank", "get_world_size", "WORLD", "get_node_local_rank"}
# Where `group` stands among the arguments.
COLLECTIVES = {
    "all_reduce": 2,
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "all_to_all_single": 4,
    "barrier": 0,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "gather": 3,
    "gather_object": 3,
    "reduce": 3,
    "reduce_scatter_tensor": 3,
    "scatter": 3,
}


def files(*left_out: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(left_out):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def asks_the_world(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ASKED:
            yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found = [alias.name for alias in node.names if alias.name in ASKED | set(COLLECTIVES)]
            yield from (f"{node.lineno}: from {node.module} import {name}" for name in found)


def leaves_its_group_out(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        place = COLLECTIVES.get(node.func.attr)
        if place is None or ast.unparse(node.func.value) not in ("dist", "torch.distributed"):
            continue
        if len(node.args) <= place and not any(each.arg == "group" for each in node.keywords):
            yield f"{node.lineno}: {ast.unparse(node)}"


def computes_with_its_size(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("world_size", "devices_per_node"):
            owner = ast.unparse(node.value)
            if owner.endswith(("plan", "cluster")):
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("look", [asks_the_world, leaves_its_group_out])
def test_nobody_else_asks_torch_for_the_world(look) -> None:
    assert [f"{name}:{found}" for name, tree in files(*KNOW) for found in look(tree)] == []


def test_workers_take_the_number_of_ranks_from_the_mesh() -> None:
    left_out = (*KNOW, *PLAN)
    found = [f"{n}:{each}" for n, tree in files(*left_out) for each in computes_with_its_size(tree)]
    assert found == []


@pytest.mark.parametrize(
    ("line", "look"),
    [
        ("dist.get_rank() == 0", asks_the_world),
        ("x = torch.distributed.get_world_size(group)", asks_the_world),
        ("group = dist.group.WORLD", asks_the_world),
        ("from torch.distributed import get_rank", asks_the_world),
        ("dist.all_reduce(x)", leaves_its_group_out),
        ("dist.all_reduce(x, dist.ReduceOp.MAX)", leaves_its_group_out),
        ("dist.barrier()", leaves_its_group_out),
        ("plan.world_size + 1", computes_with_its_size),
    ],
)
def test_each_form_would_be_seen(line: str, look) -> None:
    assert list(look(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["dist.all_reduce(x, group=group)", "dist.barrier(group)", "dist.new_group(ranks)"]
)
def test_a_named_group_is_right(line: str) -> None:
    assert not list(leaves_its_group_out(ast.parse(line)))
