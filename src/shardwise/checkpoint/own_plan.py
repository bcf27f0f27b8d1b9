"""The plan inside a checkpoint: plain data that carries no authority.

A resume compares its own plan with this one. This plan also says which model the tensors belong to.
Neither code nor the path of code is ever taken from it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.durable_files import read_small, validate_absent
from shardwise.checkpoint.manifest import PLAN_NAME, Damaged
from shardwise.files import parse_json

_MAX_BYTES = 2**28
# The depth of mappings and lists; a plan has a handful of levels.
_MAX_DEPTH = 64


def read_own_plan(directory: Path) -> dict[str, Any]:
    """plan.json of a checkpoint, or Damaged where no version of shardwise wrote such a plan.

    It stays plain data, because a plan of another version may have fields that this one cannot
    read.
    """
    try:
        plan = parse_json(read_small(directory / PLAN_NAME, _MAX_BYTES).decode("utf-8"))
    except OSError as error:
        validate_absent(directory / PLAN_NAME, error)
        raise Damaged(PLAN_NAME, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Damaged(PLAN_NAME, f"is not a plan: {error}") from error
    for fault in _faults(plan):
        raise Damaged(PLAN_NAME, f"is not a plan: {fault}")
    found: dict[str, Any] = plan
    return found


def wants_own_code(plan: Mapping[str, Any]) -> bool:
    """Whether the model was built by code that came with it."""
    model = plan["config"].get("model")
    return isinstance(model, Mapping) and model.get("trust_remote_code", False) is not False


def _faults(plan: Any) -> Iterator[str]:
    """Faults in what every reader relies on."""
    if not isinstance(plan, dict):
        yield "it is not a mapping"
        return
    if _is_deep(plan):
        yield "it is nested too deeply"
        return
    for name in ("config", "hf_config", "choices"):
        if not isinstance(plan.get(name), dict):
            yield f"its {name} is not a mapping"
            return
    if any(not isinstance(choice, dict) for choice in plan["choices"].values()):
        yield "it has a choice that is not a mapping"


def _is_deep(tree: Any) -> bool:
    level = [tree]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return bool(level)
