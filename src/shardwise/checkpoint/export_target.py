"""The directory that an export makes. It gets its name once everything in it is on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from shardwise.checkpoint.durable_files import rename, sync_directory, sync_handle
from shardwise.errors import UserError
from shardwise.files import free_name, user_path


def validate_target(target: Path) -> None:
    """Raise unless `target` is absent or an empty directory: nothing is overwritten."""
    target = user_path(str(target))
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise UserError(
            f"{target} exists and is not empty",
            why="an export overwrites nothing",
            fix=f"write --to {quote(str(free_name(target)))}, or another new directory",
        )


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A directory beside `target`. It is renamed to `target` once everything is on disk, and
    removed after an error."""
    validate_target(target)
    aside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # left by an export that was killed
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in aside.iterdir():
            _sync_file(path)
        sync_directory(aside)
        rename(aside, target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        sync_handle(file.fileno())
