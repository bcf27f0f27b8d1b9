"""What ranks read: decisions and settings. The user's configuration is for whoever plans."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[3] / "src" / "shardwise"
# `tunnel` and `launch/worker.py` run a rank too; `verify` and `report` read what one has left.
ROOMS = ("model", "parallel", "data", "training", "checkpoint", "metrics", "kernels", "tunnel")
FILES = [file for room in ROOMS for file in sorted((SRC / room).rglob("*.py"))]
FILES += [*sorted((SRC / "verify").rglob("*.py")), *sorted((SRC / "report").glob("*.py"))]
FILES += [SRC / "launch" / "worker.py"]
READERS = ("load_config", "config_from_dict")


def reads_of_config(source: str) -> Iterator[int]:
    """Lines that take the configuration from a plan, or read one from a file."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr="config", value=ast.Name(id=name)) if is_plan(name):
                yield node.lineno
            case ast.Attribute(attr="config", value=ast.Attribute(attr=name)) if is_plan(name):
                yield node.lineno
            case ast.Name(id=name) if name in READERS:
                yield node.lineno


def is_plan(name: str) -> bool:
    return name in ("plan", "here", "chosen") or name.endswith("_plan")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_no_rank_reads_the_users_configuration(file: Path) -> None:
    assert not list(reads_of_config(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "source",
    ["plan.config.train.steps", "self.plan.config", "a = here.config", "load_config('run.yaml')"],
)
def test_a_read_would_be_found(source: str) -> None:
    assert list(reads_of_config(source)) == [1]
