"""The directory of checkpoints: written aside, published by rename, never overwritten.

step-00000060/               published: whole, and good unless its bytes say otherwise
partial-step-00000120.3/     a save of the third job here that has not ended; never chosen
quarantined-step-00000090/   found damaged; reason.txt says what and where; never chosen

Needs no torch: reports and command lines list checkpoints too.
"""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.checkpoint.files import rename, sync_directory, write_file
from shardwise.checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    PLAN_NAME,
    Damaged,
    Manifest,
    read_manifest,
)
from shardwise.lease.lease import UNFENCED, Fence

# What a kill leaves half removed.
_REMOVED = ".removed"
State = Literal["not verified", "damaged", "partial", "quarantined"]
_NAME = re.compile(r"(?:(partial|quarantined)-)?step-(\d{8})(?:\.\d+)?")


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
        """Whether a save of it ended and nobody has set it aside."""
        return self.state in ("not verified", "damaged")

    @property
    def manifest(self) -> Manifest | None:
        """Of a whole one."""
        return None if self.checkpoint is None else self.checkpoint.manifest


def list_entries(root: Path) -> list[Entry]:
    """Everything in the store by step, judged by manifests and sizes (hashes: `check_files`)."""
    entries = []
    for path in root.glob("*step-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        kind, step = match.group(1), int(match.group(2))
        if kind is not None:
            entries.append(Entry(path, step, kind, None, _reason(path)))  # type: ignore[arg-type]
        else:
            entries.append(_judge(path, step))
    return sorted(entries, key=lambda entry: (entry.step, entry.path.name))


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Whole checkpoints, oldest first."""
    return [entry.checkpoint for entry in list_entries(root) if entry.checkpoint is not None]


def partial_path(root: Path, step: int, epoch: int = 0) -> Path:
    """Where a checkpoint is written before it is published.

    Every holder of the run directory has names of its own. Else a job that has lost it could
    publish what the next one has only begun to write.
    """
    return root / f"partial-step-{step:08d}{f'.{epoch}' if epoch else ''}"


def final_path(root: Path, step: int) -> Path:
    """Where a checkpoint is found."""
    return root / f"step-{step:08d}"


def clear_partials(root: Path) -> None:
    """Remove what ended saves left behind, and give their space back."""
    for path in root.glob("partial-step-*"):
        discard(path)


def discard(partial: Path) -> None:
    """Remove one of them.

    It is renamed first, which happens whole or not at all. A job that has lost the run directory
    then publishes either all of its save or nothing, whenever it wakes up.
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
    # The next holder takes the lease first and then clears away what it finds: who passes this
    # line and finds its directory gone has come too late, and who finds it there is in time.
    fence.validate()
    rename(partial, final)
    sync_directory(root)
    return Checkpoint(final, manifest)


def quarantine(path: Path, reasons: Iterable[str]) -> Path:
    """Move a damaged checkpoint out of the way, with what was found written beside it."""
    target = path.with_name(f"quarantined-{path.name}")
    number = 1
    while target.exists():
        target = path.with_name(f"quarantined-{path.name}.{number}")
        number += 1
    path.rename(target)
    text = ("\n".join(reasons) + "\n").encode(errors="backslashreplace")
    # On a full disk the name alone must do.
    with suppress(OSError):
        (target / "reason.txt").write_bytes(text)
    return target


def prune(root: Path, keep: int) -> list[Path]:
    """Remove the oldest whole checkpoints beyond `keep`; the last whole one always stays."""
    old = list_checkpoints(root)[: -max(1, keep)]
    for found in old:
        # Renamed first: a kill half-way leaves a partial directory, not a damaged checkpoint.
        aside = partial_path(root, found.step)
        rename(found.path, aside)
        if aside.is_symlink():
            aside.unlink()
        else:
            shutil.rmtree(aside)
    return [found.path for found in old]


def _judge(path: Path, step: int) -> Entry:
    """By manifest and sizes only: cheap enough to do for every checkpoint at every start."""
    try:
        checkpoint = Checkpoint(path, read_manifest(path))
        if checkpoint.step != step:
            raise Damaged(MANIFEST_NAME, f"is of step {checkpoint.step}, not {step}")
        for name, expected in checkpoint.manifest.files.items():
            actual = _size(path / name)
            if actual != expected.bytes:
                raise Damaged(name, f"has {actual} bytes, {expected.bytes} were written")
    except Damaged as damage:
        return Entry(path, step, "damaged", None, str(damage))
    return Entry(path, step, "not verified", checkpoint)


def _reason(path: Path) -> str:
    try:
        return (path / "reason.txt").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _size(path: Path) -> int | None:
    """None where there is no plain file; a checkpoint may be pruned while it is judged."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
