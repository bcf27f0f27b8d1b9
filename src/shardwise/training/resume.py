"""How all ranks of a run agree to go on from a checkpoint, and what they say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.checkpoint.resume import Resumption, judge_resume
from shardwise.checkpoint.store import Checkpoint
from shardwise.errors import UserError
from shardwise.metrics.events import EventLog
from shardwise.plan.plan import Plan
from shardwise.training.run_directory import write_run_directory

T = TypeVar("T")


def decide_together(decide: Callable[[], T]) -> T:
    """What `decide` returns on rank 0, on every rank; its UserError ends every rank alike."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [decide()]
        except UserError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], UserError):
        raise outcome[0]
    result: T = outcome[0]
    return result


def accept_resume(plan: Plan, found: Checkpoint, data: str) -> Resumption:
    """How the run goes on with the tokens of this identity; from now on its directory says so."""

    def accept() -> Resumption:
        resumption = judge_resume(found, plan, data)
        write_run_directory(plan)
        return resumption

    return decide_together(accept)


def announce_resume(accepted: Resumption, events: EventLog, say: Callable[[str], None]) -> None:
    """Say what is not as it was, and where the run goes on."""
    found = accepted.checkpoint
    data = "continued"
    if accepted.changes:
        say(f"changed since step {found.step}:")
    for change in accepted.changes:
        say(f"  {change}")
    if not accepted.remembers_data:
        data = "taken to be the same"
        say("the checkpoint is too old to tell its data, which is taken to be the same")
    if accepted.restarts_data:
        data = "restarted"
        say("the data is read from its start, as data.on_change=restart says")
    say(f"resumed at step {found.step} from {found.path}")
    events.write(
        "resume",
        step=found.step,
        written_by=found.manifest.world_size,
        position=accepted.position,
        data=data,
        changes=[str(change) for change in accepted.changes],
    )
