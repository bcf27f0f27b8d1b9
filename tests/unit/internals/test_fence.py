"""The fence: no room but `internals` uses a private name of torch or transformers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise

ROOT = Path(shardwise.__file__).parent
LIBRARIES = ("torch", "transformers")
# Undocumented, though no underscore says so.
UNDOCUMENTED = ("transformers.core_model_loading", "transformers.conversion_mapping")
# ATen's operators are named by their schema, whose underscores say nothing about a promise. They
# are looked up when a file is imported, so one that is gone shows. Python documents os._exit.
NOT_PRIVATE = ("torch.ops.aten.", "_ATEN.", "os._exit")
ACCESSORS = ("getattr", "hasattr", "setattr")
# Private names of other libraries, with the one file that may use them.
OTHERS = {
    # torchao's wrappers of a float8 weight: its data, its scale, and what is cast.
    "parallel/torchao_float8.py": {"_precomputed_scale", "_tensor", "_dtype"},
    "parallel/float8_linear.py": {"_data", "_scale"},
    # FlashAttention 4: its public function runs backward by itself.
    "kernels/attention.py": {"_flash_attn_fwd", "_flash_attn_bwd"},
}
# Their texts are names that scripts of others use. None of them is imported here.
READ_SCRIPTS = ("migrate/script.py", "migrate/script_names.py")


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_private_path(path: str) -> bool:
    """Whether a dotted name is private to one of the libraries."""
    library, *parts = path.split(".")
    return library in LIBRARIES and (
        any(map(private, parts)) or path.startswith(UNDOCUMENTED) or "._" in path
    )


def own_names(tree: ast.Module) -> set[str]:
    """What a file defines itself: functions, classes, attributes of `self`, fields, variables."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{node.attr}":
            found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return found


def names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names that are, or may be, private to a library, with their lines."""
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            paths = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from ((node.lineno, path) for path in paths if is_private_path(path))
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
            yield from ((node.lineno, path) for path in paths if is_private_path(path))
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
            if not ast.unparse(node).startswith(NOT_PRIVATE):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ACCESSORS:
            named = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
            yield from ((node.lineno, name) for name in named if private(str(name)))
        elif isinstance(node, ast.Constant) and is_private_text(node.value):
            yield node.lineno, node.value


def is_private_text(value: object) -> bool:
    """Whether a string names a private module, or an operator of torch.distributed."""
    if not isinstance(value, str) or " " in value:
        return False
    return is_private_path(value) or value.startswith(("fsdp::", "_c10d", "c10d::_"))


def found_in(path: Path) -> list[tuple[int, str]]:
    place = path.relative_to(ROOT).as_posix()
    allowed = OTHERS.get(place, set())
    found = [each for each in names_in(ast.parse(path.read_text())) if each[1] not in allowed]
    return [each for each in found if place not in READ_SCRIPTS or not is_private_text(each[1])]


def test_private_names_are_used_behind_the_fence_only() -> None:
    outside = [path for path in ROOT.rglob("*.py") if path.parent != ROOT / "internals"]
    assert len(outside) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for path in outside
        for line, name in found_in(path)
    ]
    assert not found, "give it a place in src/shardwise/internals, and a test beside this one"


def test_what_the_table_allows_is_in_use() -> None:
    for place, names in OTHERS.items():
        used = {name for _, name in names_in(ast.parse((ROOT / place).read_text()))}
        assert names <= used, place


@pytest.mark.parametrize(
    "line",
    [
        "from torch.distributed.fsdp._fully_shard import FSDPParam",
        "from torch.distributed.tensor.placement_types import _StridedShard",
        "import torch.distributed._functional_collectives as funcol",
        "import torch._dynamo",
        "from transformers.core_model_loading import WeightConverter",
        "state = module._get_fsdp_state()",
        "value = torch._scaled_mm(a, b)",
        "value = getattr(model, '_no_split_modules', None)",
        "name = 'torch.distributed._shard.sharded_tensor.metadata'",
        "torch.ops.fsdp.chunk_cat('fsdp::chunk_cat')",
    ],
)
def test_the_test_sees_each_way_to_use_one(line: str) -> None:
    assert list(names_in(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "from torch.distributed.fsdp import FSDPModule",
        "class A:\n    def __init__(self): self._x = 1\n    def f(self): return self._x",
        "op = torch.ops.aten._scaled_mm.default",
        "name = '__main__'",
    ],
)
def test_the_test_lets_the_rest_pass(line: str) -> None:
    assert not list(names_in(ast.parse(line)))
