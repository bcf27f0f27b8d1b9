"""The gates of a run: those that its record holds, or else judged now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.report.collect import RunRecord
from shardwise.report.values import Event, number, of_kind
from shardwise.verify.gates import check_gates

# What a step must tell to be judged; a loss that is no number is what one of the gates looks for.
_NEEDS = (
    ("step_s",),
    ("grad_norm",),
    ("tokens_per_s",),
    ("data_share",),
    ("memory", "allocated"),
    ("memory", "reserved"),
    ("memory_capacity",),
)


def gates_of(run: RunRecord) -> Sequence[Mapping[str, Any]]:
    """Name, figure, bound, verdict and advice of each; none before there is a step to judge."""
    # A verdict that steps came after is one on an earlier end of the run.
    for event in of_kind(run.events, "gates", "step")[-1:]:
        recorded = event.get("gates")
        if isinstance(recorded, list):
            return [gate for gate in recorded if isinstance(gate, Mapping)]
    steps = [event for event in run.steps if _is_judged(event)]
    if run.plan is None or not steps:
        return []
    timed = [event for event in run.history("collectives") if _names_late(event)]
    timed += [e for e in run.history("profile") if number(e, "exposed_share") is not None]
    damaged = [f"step {kept.step}" for kept in run.checkpoints if kept.is_bad]
    return [asdict(gate) for gate in check_gates(run.plan, [*steps, *timed], damaged)]


def _is_judged(event: Event) -> bool:
    share = event.get("efficiency", "")
    has_share = share is None or number(share, "mfu") is not None
    has_loss = isinstance(event.get("loss"), float)
    return has_share and has_loss and all(number(event, *path) is not None for path in _NEEDS)


def _names_late(event: Event) -> bool:
    late = event.get("straggler")
    return number(late, "rank") is not None and number(late, "behind_s") is not None
