"""The directory of checkpoints: written aside, published by rename, never overwritten.

step-00000060/               published: whole, and good unless its bytes say otherwise
partial-step-00000120.3/     a save of the third job here that has not ended; never chosen
quarantined-step-00000090/   found damaged; reason.txt says what and where; never chosen

Needs no torch: reports and command lines list checkpoints too.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from shardwise.checkpoint.durable_files import (
    Fingerprint,
    Unreadable,
    fingerprint_of_bytes,
    open_plain,
    plain_size,
    rename,
    sync_directory,
    unreadable,
    write_file,
)
from shardwise.checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    PLAN_NAME,
    Damaged,
    Manifest,
    read_manifest,
)
from shardwise.errors import ExitCode, UserError
from shardwise.lease.lease import UNFENCED, Fence

# What a kill leaves half removed.
_REMOVED = ".removed"
State = Literal["not verified", "damaged", "unreadable", "partial", "quarantined"]
_NAME = re.compile(r"(?:(partial|quarantined)-)?step-(\d{8})(?:\.\d+)?")
_REASON_NAME = "reason.txt"
# reason.txt has one line per damaged file. No more than this is read.
_MAX_REASON_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint whose manifest is whole."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step it was taken after."""
        return self.manifest.step


@dataclass(frozen=True, slots=True)
class Entry:
    """A directory of the store, whatever its state."""

    path: Path
    step: int
    state: State
    checkpoint: Checkpoint | None
    reason: str = ""

    @property
    def is_published(self) -> bool:
        """Whether its save ended and it has not been quarantined."""
        return self.state in ("not verified", "damaged", "unreadable")

    @property
    def is_bad(self) -> bool:
        """Whether someone should look at it."""
        return self.state in ("damaged", "unreadable", "quarantined")

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of a whole checkpoint."""
        return None if self.checkpoint is None else self.checkpoint.manifest


class Pruned(UserError):
    """A checkpoint was removed while it was read: a running job prunes its checkpoints."""


def list_entries(root: Path) -> list[Entry]:
    """Everything in the store by step, judged by manifests and sizes (`check_files` compares
    hashes).

    A store that cannot be read is an error: it may hold checkpoints.
    """
    found = (_entry(root / name) for name in _names(root))
    entries = [entry for entry in found if entry is not None]
    return sorted(entries, key=lambda entry: (entry.step, entry.path.name))


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Whole checkpoints, oldest first. Those that cannot be read are left out."""
    return [entry.checkpoint for entry in list_entries(root) if entry.checkpoint is not None]


def partial_path(root: Path, step: int, epoch: int = 0) -> Path:
    """Where a checkpoint is written before it is published.

    Every holder of the run directory has names of its own. Otherwise a job that has lost the
    directory could publish what the next holder has only begun to write.
    """
    return root / f"partial-step-{step:08d}{f'.{epoch}' if epoch else ''}"


def final_path(root: Path, step: int) -> Path:
    """Where a checkpoint is found."""
    return root / f"step-{step:08d}"


def clear_partials(root: Path) -> None:
    """Remove unfinished saves, and free their space.

    A directory that cannot be listed is no error here: `list_entries` reports it.
    """
    with suppress(OSError):
        for path in root.glob("partial-step-*"):
            discard(path)


def discard(partial: Path) -> None:
    """Remove one unfinished save.

    It is renamed first, which is atomic. A job that has lost the run directory then publishes all
    of its save or nothing, whenever it wakes up.
    """
    gone = partial.with_name(partial.name.removesuffix(_REMOVED) + _REMOVED)
    if partial != gone:
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(OSError):
            partial.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def begin(root: Path, step: int, fence: Fence = UNFENCED) -> Path:
    """An empty directory to write step `step` into."""
    fence.validate()
    path = partial_path(root, step, fence.epoch)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def publish(
    root: Path, manifest: Manifest, index: bytes, plan: bytes, fence: Fence = UNFENCED
) -> Checkpoint:
    """Write index, plan and manifest beside the shards, make all durable, rename into place."""
    partial = partial_path(root, manifest.step, fence.epoch)
    final = final_path(root, manifest.step)
    manifest.files[INDEX_NAME] = write_file(partial / INDEX_NAME, index)
    manifest.files[PLAN_NAME] = write_file(partial / PLAN_NAME, plan)
    write_file(partial / MANIFEST_NAME, manifest.to_bytes())
    sync_directory(partial)
    # The next holder takes the lease first and then removes what it finds. A job that passes this
    # line and finds its directory gone is too late; one that finds it is in time.
    fence.validate()
    rename(partial, final)
    sync_directory(root)
    return Checkpoint(final, manifest)


def small_files(published: Checkpoint) -> dict[str, Fingerprint]:
    """What `publish` wrote, as it was written."""
    manifest = published.manifest
    own = fingerprint_of_bytes(manifest.to_bytes())
    return {name: manifest.files[name] for name in (INDEX_NAME, PLAN_NAME)} | {MANIFEST_NAME: own}


def quarantine(path: Path, reasons: Iterable[str]) -> Path:
    """Move a damaged checkpoint out of the way, with what was found written beside it."""
    target = path.with_name(f"quarantined-{path.name}")
    number = 1
    while os.path.lexists(target):
        target = path.with_name(f"quarantined-{path.name}.{number}")
        number += 1
    try:
        path.rename(target)
    except OSError as error:
        raise UserError(
            f"{path} is damaged and cannot be set aside: {error.strerror}",
            why="; ".join(reasons),
            fix=f"give this user the right to rename it: ls -ld {quote(str(path.parent))}; then "
            "run the same command again",
            code=ExitCode.ENVIRONMENT,
        ) from error
    text = ("\n".join(reasons) + "\n").encode(errors="backslashreplace")
    # On a full disk the name alone must do. So it must for a link to another directory, which is
    # not ours to write into.
    with suppress(OSError):
        _write_reason(target, text)
    return target


def validate_readable(entry: Entry) -> None:
    """Raise where a published checkpoint cannot be read."""
    if entry.state == "unreadable":
        raise unreadable(entry.path, entry.reason)


def validate_kept(path: Path) -> None:
    """Raise where a checkpoint that was listed has been removed."""
    if not os.path.lexists(path):
        raise Pruned(
            f"{path} was removed while it was read",
            why="a job is training in this run directory, and removes checkpoints beyond "
            "checkpoint.keep",
            fix="run the same command again; it finds the newer ones",
            code=ExitCode.ENVIRONMENT,
        )


def best_of(found: Sequence[Checkpoint]) -> Checkpoint | None:
    """The best of these by their held-out losses, as the newest of them knows; None where it was
    not evaluated or not kept.

    No checkpoint is marked as the best: a mark would have to move, and nothing in a published
    checkpoint is ever changed.
    """
    held_out = found[-1].manifest.held_out if found else None
    if held_out is None:
        return None
    return next((each for each in found if held_out.is_best_at(each.step)), None)


def outdated(root: Path, keep: int, *, keep_best: bool = False) -> list[Checkpoint]:
    """The oldest whole checkpoints beyond `keep`; the last whole one is never among them, nor with
    `keep_best` the best one."""
    found = list_checkpoints(root)
    best = best_of(found) if keep_best else None
    return [each for each in found[: -max(1, keep)] if each is not best]


def remove(root: Path, old: Iterable[Checkpoint]) -> None:
    """Remove these. Call it only after a newer one has been read and found good."""
    for found in old:
        # Renaming comes first, so a kill half-way leaves a partial directory and no damaged
        # checkpoint.
        aside = partial_path(root, found.step)
        with suppress(FileNotFoundError):  # another command may have removed it
            rename(found.path, aside)
            if aside.is_symlink():
                aside.unlink()
            else:
                shutil.rmtree(aside)


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not root.is_symlink():
            return []
        # A link to nothing, for one, is a disk that is not mounted.
        raise unreadable(root, error.strerror or str(error)) from error


def _entry(path: Path) -> Entry | None:
    """The entry of a path, or None where this is no checkpoint, or no longer one."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    kind, step = match.group(1), int(match.group(2))
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return None
        if kind is not None:
            return Entry(path, step, kind, None, _reason(path))  # type: ignore[arg-type]
        return Entry(path, step, "not verified", _judge(path, step))
    except Damaged as damage:
        gone = not os.path.lexists(path)
        return None if gone else Entry(path, step, "damaged", None, str(damage))
    except Unreadable as error:
        return Entry(path, step, "unreadable", None, error.reason)
    except OSError as error:
        if not os.path.lexists(path):
            return None
        # A link to a place that is not there, for one, or a directory of another user.
        return Entry(path, step, "unreadable", None, error.strerror or str(error))


def _judge(path: Path, step: int) -> Checkpoint:
    """The state by manifest and sizes only: cheap enough for every checkpoint at every start."""
    checkpoint = Checkpoint(path, read_manifest(path))
    if checkpoint.step != step:
        raise Damaged(MANIFEST_NAME, f"is of step {checkpoint.step}, not {step}")
    for name, expected in checkpoint.manifest.files.items():
        actual = plain_size(path / name)
        if actual is None:
            raise Damaged(name, "there is no such plain file")
        if actual != expected.bytes:
            raise Damaged(name, f"has {actual} bytes, {expected.bytes} were written")
    return checkpoint


def _reason(path: Path) -> str:
    """The beginning of reason.txt; empty where there is no such plain file."""
    try:
        with open_plain(path / _REASON_NAME) as file:
            return file.read(_MAX_REASON_BYTES).decode("utf-8", errors="replace").strip()
    except OSError:
        return ""


def _write_reason(directory: Path, text: bytes) -> None:
    """Write the reason to a new file in this directory. Links are not followed: someone else may
    have put them there."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with suppress(FileNotFoundError):
            os.unlink(_REASON_NAME, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        handle = os.open(_REASON_NAME, flags, 0o644, dir_fd=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(text)
    finally:
        os.close(folder)
