"""Read a checkpoint without ranks: find it, verify it, and assemble whole tensors from its
pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.durable_files import unreadable
from shardwise.checkpoint.index import Index, StoredTensor, read_index
from shardwise.checkpoint.manifest import MANIFEST_NAME, PLAN_NAME
from shardwise.checkpoint.signature import why_not_signed
from shardwise.checkpoint.storage import open_piece
from shardwise.checkpoint.store import (
    Checkpoint,
    Entry,
    best_of,
    list_entries,
    validate_kept,
    validate_readable,
)
from shardwise.errors import ExitCode, UserError, printable
from shardwise.plan.planned import Plan


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose bytes are all as they were written."""

    path: Path
    plan: Plan
    index: Index


def find_checkpoint(run: Path, step: int | None = None, *, best: bool = False) -> Path:
    """The newest checkpoint of a run directory, that of `step`, or the best one. `run` may be a
    checkpoint too.

    A damaged one is found like any other: skipping it would silently give an older model. One that
    cannot be read is an error.
    """
    if best and step is not None:
        raise UserError(
            f"--best and --step {step} are both given", fix="leave --best out, or leave --step out"
        )
    if (run / MANIFEST_NAME).exists() or run.name.startswith("step-"):
        if step is not None or best:
            asked = "--best" if best else f"--step {step}"
            raise UserError(
                f"{run} is one checkpoint, and {asked} was asked for",
                fix=f"leave {asked.split()[0]} out, or name the run directory {run.parent.parent}",
            )
        if not run.is_dir():
            raise UserError(
                f"there is no checkpoint {run}",
                fix="name a run directory (runs/NAME) that has saved a checkpoint",
            )
        return run
    entries = _published(run)
    if best:
        return _best(run, entries).path
    found = [entry for entry in entries if step is None or entry.step == step]
    if not found:
        raise UserError(
            f"there is no checkpoint{'' if step is None else f' of step {step}'} in {run}",
            why=f"it has {_steps(entries)}" if entries else "nothing was saved there",
            fix=f"write --step {entries[-1].step}"
            if entries
            else "name a run directory (runs/NAME) that has saved a checkpoint",
        )
    validate_readable(found[-1])
    return found[-1].path


def _best(run: Path, entries: list[Entry]) -> Checkpoint:
    """The checkpoint with the lowest held-out loss, or an error that says why there is none."""
    whole = [entry.checkpoint for entry in entries if entry.checkpoint is not None]
    found = best_of(whole)
    if found is not None:
        return found
    held_out = whole[-1].manifest.held_out if whole else None
    if held_out is None or held_out.best_step is None:
        why = "no checkpoint there was evaluated"
    else:
        why = f"the best step was {held_out.best_step}, and it has {_steps(entries)}"
    raise UserError(
        f"there is no best checkpoint in {run}",
        why=why,
        fix="train with train.eval_every=100 data.eval_fraction=0.02 checkpoint.keep_best=true, or "
        "leave --best out",
    )


def verify_checkpoint(path: Path, key: bytes | None = None) -> VerifiedCheckpoint:
    """Hash every file of a checkpoint, then read its plan and index; damage is a UserError.

    With a key, a checkpoint that was not signed with it is a UserError too.
    """
    damages = check_checkpoint(path)
    if not damages and key is not None and (unsigned := why_not_signed(path, key)):
        raise UserError(
            f"checkpoint {path} is not the one that was signed",
            why=unsigned,
            fix="restore it from a backup, or name the file of the key that signed it: --key FILE",
            code=ExitCode.VERIFY_FAILED,
        )
    if damages:
        others = [e for e in _published(path.parent) if e.checkpoint is not None and e.path != path]
        raise UserError(
            f"checkpoint {path} is damaged",
            why=printable("; ".join(str(damage) for damage in damages)),
            fix=f"take another: --step {others[-1].step} (there are {_steps(others)})"
            if others
            else "there is no other checkpoint in this run; restore it from a backup",
            code=ExitCode.VERIFY_FAILED,
        )
    return VerifiedCheckpoint(path, _load_plan(path), read_index(path))


def read_tensor(directory: Path, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    """One whole tensor, cast to `dtype` piece by piece."""
    try:
        return _assemble(directory, stored, dtype)
    except OSError as error:
        validate_kept(directory)
        raise unreadable(directory, error.strerror or str(error)) from error


def _assemble(directory: Path, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    whole = torch.empty(stored.shape, dtype=dtype)
    for piece in stored.pieces:
        if math.prod(piece.sizes):
            block = whole
            for dim, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                block = block.narrow(dim, offset, size)
            with open_piece(directory, stored, piece.offsets) as part:
                block.copy_(part)
    return whole


def _load_plan(path: Path) -> Plan:
    try:
        return Plan.load(path / PLAN_NAME)
    except UserError as error:
        raise UserError(
            f"{path / PLAN_NAME} is not a plan that this version can read",
            why=printable(error.why),
            fix="use the shardwise that manifest.json names, or restore it from a backup",
            code=ExitCode.VERIFY_FAILED,
        ) from error


def _published(run: Path) -> list[Entry]:
    if not run.is_dir():
        return []
    root = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    return [entry for entry in list_entries(root) if entry.is_published]


def _steps(entries: list[Entry]) -> str:
    return "steps " + ", ".join(str(entry.step) for entry in entries)
