"""The verdict of `shardwise checkpoint` on each checkpoint, with texts and exit codes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.durable_files import Unreadable
from shardwise.checkpoint.manifest import Damaged
from shardwise.checkpoint.signature import why_not_signed
from shardwise.checkpoint.store import Entry, Pruned, validate_kept, validate_readable
from shardwise.errors import ExitCode, UserError

# How each state is shown by `verify`, whose lines are few.
SHOWN = {
    "damaged": "DAMAGED",
    "other model": "NOT THE MODEL THAT ITS PLAN DESCRIBES",
    "not signed": "NOT SIGNED WITH THIS KEY",
    "unreadable": "CANNOT BE READ",
    "gone": "pruned meanwhile",
}


@dataclass(frozen=True, slots=True)
class JudgedCheckpoint:
    """A checkpoint directory, and its verdict."""

    entry: Entry
    state: str
    problems: tuple[str, ...] = ()
    note: str = ""
    """What could not be checked, where the verdict is good."""


def as_listed(entry: Entry) -> JudgedCheckpoint:
    """The verdict by manifest and sizes."""
    return JudgedCheckpoint(entry, entry.state, tuple(entry.reason.splitlines()))


def judge(entry: Entry, key: bytes | None = None, *, hashes_only: bool = False) -> JudgedCheckpoint:
    """Judge a checkpoint: hash all its bytes, verify its signature where a key is given, and
    compare its tensors with its model.

    Only the model needs torch; `hashes_only` leaves it out.
    """
    if not entry.is_published:
        return as_listed(entry)
    try:
        validate_readable(entry)
        problems = [str(damage) for damage in check_checkpoint(entry.path)]
        if not problems and entry.state == "damaged":
            problems = [entry.reason]
        if problems:
            return JudgedCheckpoint(entry, "damaged", tuple(problems))
        if key is not None and (unsigned := why_not_signed(entry.path, key)):
            return JudgedCheckpoint(entry, "not signed", (unsigned,))
        if hashes_only:
            return JudgedCheckpoint(
                entry, "good", note="not compared with its model: --hashes-only"
            )
        return _compare_with_model(entry)
    except Unreadable as error:
        return JudgedCheckpoint(entry, "unreadable", (error.reason,))
    except Pruned:
        return JudgedCheckpoint(entry, "gone")


def refuse_bad(run: Path, judged: Iterable[JudgedCheckpoint]) -> None:
    """Raise where a checkpoint is not good; damage is named before the rest."""
    steps: dict[str, list[str]] = {}
    for each in judged:
        steps.setdefault(each.state, []).append(str(each.entry.step))
    for state, refusal in _REFUSALS.items():
        if state in steps:
            raise UserError(
                f"{refusal.what.format(run=run)}: step {', '.join(steps[state])}",
                why=refusal.why,
                fix=refusal.fix.format(checkpoints=quote(str(run / "checkpoints"))),
                code=refusal.code,
            )


@dataclass(frozen=True, slots=True)
class _Refusal:
    what: str
    why: str
    fix: str
    code: ExitCode = ExitCode.VERIFY_FAILED


_REFUSALS = {
    "damaged": _Refusal(
        "damaged checkpoints in {run}",
        "their bytes are not those that were written",
        "the next `shardwise train` sets them aside and goes on from the newest good one",
    ),
    "other model": _Refusal(
        "checkpoints in {run} do not hold the model that their plan describes",
        "their hashes are right, so another program has altered them, or the installed "
        "transformers uses other tensor names than the version in manifest.json",
        "verify it with that transformers, or restore it from a backup",
    ),
    "not signed": _Refusal(
        "checkpoints in {run} are not signed with this key",
        "someone who does not have the key may have written them",
        "restore it from a backup, or name the file of the key that signed it: --key FILE",
    ),
    "unreadable": _Refusal(
        "checkpoints in {run} cannot be read",
        "it is not known whether they are whole",
        "make them readable for this user on this machine: ls -l {checkpoints}",
        ExitCode.ENVIRONMENT,
    ),
}


def _compare_with_model(entry: Entry) -> JudgedCheckpoint:
    try:
        # The comparison builds the model on meta, which needs torch and transformers.
        from shardwise.checkpoint.structure import NotCompared, check_structure
    except ImportError:
        return JudgedCheckpoint(
            entry, "good", note="not compared with its model: there is no torch here"
        )
    try:
        wrong = [str(damage) for damage in check_structure(entry.path)]
    except NotCompared as reason:
        return JudgedCheckpoint(entry, "good", note=f"not compared with its model: {reason}")
    except Damaged as damage:
        validate_kept(entry.path)
        return JudgedCheckpoint(entry, "damaged", (str(damage),))
    return JudgedCheckpoint(entry, "other model" if wrong else "good", tuple(wrong))
