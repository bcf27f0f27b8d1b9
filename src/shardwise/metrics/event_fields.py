"""The fields that a line of events.jsonl must have, because readers rely on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
# A larger number is no step, token or byte count of any run, and breaks arithmetic.
_LARGEST = 2**63


def is_event(value: Any) -> bool:
    """Whether a line's value is an event at all."""
    return isinstance(value, dict) and isinstance(value.get("event"), str)


def is_whole(event: dict[str, Any]) -> bool:
    """Whether an event has the fields of its kind, and no value that it cannot have."""
    for name, check in _FIELDS.get(event["event"], {}).items():
        if name not in event or not check(event[name]):
            return False
    return all(check(event[name]) for name, check in _WHERE_GIVEN.items() if name in event)


def _fits(value: Any, fields: Mapping[str, Check]) -> bool:
    return isinstance(value, dict) and all(
        name in value and check(value[name]) for name, check in fields.items()
    )


def _is_number(value: Any) -> bool:
    """NaN and infinity are losses too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not (isinstance(value, int) and abs(value) > _LARGEST)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) <= _LARGEST


def _is_duration(value: Any) -> bool:
    return _is_finite(value) and value >= 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _is_size(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_efficiency(value: Any) -> bool:
    return value is None or _fits(value, {"mfu": _is_finite, "hfu": _is_finite})


def _is_memory(value: Any) -> bool:
    return _fits(value, {"allocated": _is_count, "reserved": _is_count})


def _is_straggler(value: Any) -> bool:
    return value is None or _fits(value, {"rank": _is_count, "behind_s": _is_finite})


def _is_load(value: Any) -> bool:
    shares = dict.fromkeys(("most", "least", "entropy"), _is_duration)
    return value is None or _fits(value, {**shares, "dropped": _is_count})


def _is_preference(value: Any) -> bool:
    return value is None or _fits(value, {"accuracy": _is_duration})


def _is_axes(value: Any) -> bool:
    """What profiled steps moved along each axis."""
    row: dict[str, Check] = {"axis": lambda axis: isinstance(axis, str), "exposed_s": _is_duration}
    return isinstance(value, list) and all(_fits(each, row) for each in value)


def _is_stages(value: Any) -> bool:
    """What the ranks of a pipeline did and held."""
    row: dict[str, Check] = {"busy_s": _is_duration, "allocated": _is_count}
    return isinstance(value, list) and all(_fits(each, row) for each in value)


_WHERE_GIVEN: dict[str, Check] = {
    **{"time": _is_finite, "step": _is_count, "tokens": _is_count, "memory_planned": _is_count},
    "axes": _is_axes,
    "stages": _is_stages,
    "experts": _is_load,
    "preference": _is_preference,
}
_SAVE: dict[str, Check] = {"step": _is_count, "stage_s": _is_duration}
_FIELDS: dict[str, dict[str, Check]] = {
    "step": {
        "step": _is_count,
        "loss": _is_number,
        "grad_norm": _is_number,
        "step_s": _is_duration,
        "tokens_per_s": _is_duration,
        "efficiency": _is_efficiency,
        "memory": _is_memory,
        "memory_capacity": _is_size,
        "data_share": _is_duration,
    },
    **{name: {"step": _is_count} for name in ("start", "resume", "rollback", "end", "stopped")},
    "loss_check": {"step": _is_count, "ours": _is_number, "own": _is_number},
    "eval": {"step": _is_count, "loss": _is_number},
    "checkpoint": _SAVE,
    "checkpoint_failed": _SAVE,
    "collectives": {"step": _is_count, "straggler": _is_straggler},
    "pipeline": {"step": _is_count, "bubble": _is_finite, "planned": _is_finite},
    "profile": {"step": _is_count, "exposed_share": _is_finite},
}
