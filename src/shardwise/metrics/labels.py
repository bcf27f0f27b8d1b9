"""Annotations that a run puts into a trace, and that are read back from it."""

from __future__ import annotations

from dataclasses import dataclass

STEP, UNIT, PLAYED, ALONG = "step ", "unit ", "collective ", "along "


def step_label(step: int) -> str:
    """The annotation around a step."""
    return f"{STEP}{step}"


def unit_label(unit: str) -> str:
    """The annotation around a unit's forward."""
    return f"{UNIT}{unit}"


def collective_label(kind: str) -> str:
    """The annotation around an emulated collective."""
    return f"{PLAYED}{kind}"


def along_label(axis: str, num_bytes: int) -> str:
    """The annotation around the call of a collective along an axis of the mesh."""
    return f"{ALONG}{axis} {num_bytes}"


@dataclass(frozen=True, slots=True)
class AxisCall:
    """What one call has moved along an axis, and when the host called."""

    axis: str
    num_bytes: int
    moment: float


def call_in(label: str, moment: float) -> AxisCall:
    """What an annotation of `along_label` says."""
    axis, num_bytes = label.removeprefix(ALONG).split(" ")
    return AxisCall(axis, int(num_bytes), moment)
