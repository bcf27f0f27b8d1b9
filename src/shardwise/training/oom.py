"""Out of device memory: what was allocated beside what was planned, in a file and in the error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ExitCode, UserError
from shardwise.internals.functions import dump_memory_history, keep_memory_history
from shardwise.metrics.trace_file import FOLDER
from shardwise.plan.planned import Plan
from shardwise.plan.stage_recompute import modes_of
from shardwise.units import format_bytes

# By this step every allocation has happened once: Adam's state exists from the second step on.
_STEPS_THAT_FIT = 2
# This covers some steps of a large model. The oldest entries are dropped first.
_MAX_ENTRIES = 200_000


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The figures of the CUDA allocator, in bytes."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    retries: int
    """How often it had to free cached blocks and try again."""

    capacity: int


def device_memory() -> DeviceMemory:
    """The figures of this rank's GPU now."""
    stats = torch.cuda.memory_stats()
    return DeviceMemory(
        allocated=stats["allocated_bytes.all.current"],
        reserved=stats["reserved_bytes.all.current"],
        peak_allocated=stats["allocated_bytes.all.peak"],
        peak_reserved=stats["reserved_bytes.all.peak"],
        retries=stats["num_alloc_retries"],
        capacity=torch.cuda.get_device_properties().total_memory,
    )


def start_history(plan: Plan) -> None:
    """Let the allocator record a stack for each block, where the plan asks for it."""
    if plan.settings.observe.memory_history and plan.cluster.device == "cuda":
        keep_memory_history(_MAX_ENTRIES)


@contextmanager
def explained_oom(plan: Plan, rank: int, start: int, current: Callable[[], int]) -> Iterator[None]:
    """Turn an out-of-memory error of the steps after `start` into one that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        step = current() + 1
        raise _explain(plan, rank, error, step=step, made=current() - start) from error


def _explain(plan: Plan, rank: int, error: Exception, *, step: int, made: int) -> UserError:
    held, cause = device_memory(), str(error).splitlines()[0]
    files = _write_files(plan, rank, held, cause, step)
    written = f"; see {' and '.join(map(str, files))}" if files else ""
    history = plan.settings.observe.memory_history
    more = "" if history else "; to record what allocated each block: observe.memory_history=true"
    remedies = _remedies(plan)
    return UserError(
        f"out of memory in step {step}: {format_bytes(held.peak_reserved)} reserved of "
        f"{format_bytes(held.capacity)}, the plan expects {format_bytes(plan.memory.reserved)}",
        why=f"{cause}{written}",
        fix=f"write {', or '.join(remedies)}; to see what one changes: `shardwise plan FILE --set "
        f"{remedies[0]}`{more}",
        # A run that has fit until now has fragmented memory. A restart from its last checkpoint
        # gets it further.
        code=ExitCode.DOES_NOT_FIT if made < _STEPS_THAT_FIT else ExitCode.WORKER_DIED,
    )


def _remedies(plan: Plan) -> list[str]:
    """Settings that still have room, the cheapest first. Shorter sequences are always one."""
    found = []
    if set(modes_of(plan.decided)) != {"full"}:
        found.append("memory.checkpoint_activations=full")
    if plan.decided.micro_batch > 1:
        found.append(f"train.micro_batch={plan.decided.micro_batch // 2}")
    if not plan.decided.offload:
        found.append("memory.offload=cpu")
    return found or [f"data.seq_len={max(2, plan.settings.data.seq_len // 2)}"]


def _write_files(plan: Plan, rank: int, held: DeviceMemory, cause: str, step: int) -> list[Path]:
    """Write what can be written. A full disk must not hide the error that this is about."""
    folder = plan.run_dir / FOLDER
    figures: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "error": cause,
        "micro_batch": plan.decided.micro_batch,
        "seq_len": plan.settings.data.seq_len,
        "measured": asdict(held),
        "planned": asdict(plan.memory) | {"reserved": plan.memory.reserved},
    }
    files: list[Path] = []
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        path = folder / f"oom-rank-{rank}.json"
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        files.append(path)
        if plan.settings.observe.memory_history:
            dump_memory_history(path.with_suffix(".pickle"))
            files.append(path.with_suffix(".pickle"))
    return files
