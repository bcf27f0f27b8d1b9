"""Which files a user's paths stand for, in an order that every machine agrees on."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from shardwise.config.schema import DataConfig
from shardwise.config.suffixes import COMPRESSED, SUFFIXES, has_suffix
from shardwise.errors import ExitCode, UserError
from shardwise.files import user_path

# Enough for a first run to learn something, little enough to tokenise in about a second.
STDLIB_MAX_BYTES = 8_000_000
STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


def named_paths(config: DataConfig) -> list[str]:
    """`data.path` as a list. The sources that call this require it."""
    paths = [config.path] if isinstance(config.path, str) else list(config.path or [])
    if not paths:
        raise UserError(
            f"data.source {config.source} has no data.path",
            why="it says which files or dataset to read",
            fix="write data.path=FILES, or data.source=stdlib for a first run",
        )
    return paths


@contextmanager
def readable_data() -> Iterator[None]:
    """Inside, a file that may not be read is the user's error."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the data cannot be read: {error.strerror}: {error.filename}",
            why="data.path names it",
            fix="see who may read it (ls -l FILES), or name others: data.path=FILES",
            code=ExitCode.ENVIRONMENT,
        ) from error


def find_files(config: DataConfig) -> list[Path]:
    """The files that `data.path` names, directories and globs expanded, sorted, each once."""
    found: set[Path] = set()
    for pattern in named_paths(config):
        matches = list(_matches(pattern, config.source))
        if not matches:
            raise UserError(
                f"data.path {pattern!r} matches no file",
                why=f"directories are searched for {_searched(config.source)}; "
                f"relative paths start at {Path.cwd()}",
                fix="write data.path=FILES with a file, a directory or a glob that is there",
            )
        found.update(matches)
    return sorted(found)


def _searched(source: str) -> str:
    names = ", ".join(SUFFIXES[source])
    return names if source == "parquet" else f"{names}, also with {' or '.join(COMPRESSED)}"


def stdlib_root() -> Path:
    """Where the running Python keeps its own source text."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> tuple[Path, ...]:
    """The first modules of the standard library by name, up to STDLIB_MAX_BYTES."""
    return _first_modules(stdlib_root())


@cache  # a process plans more than once, and a walk takes as long as the plan of a small model
def _first_modules(root: Path) -> tuple[Path, ...]:
    chosen: list[Path] = []
    budget = STDLIB_MAX_BYTES
    for path in _modules_below(root):
        budget -= path.stat().st_size
        if budget < 0:
            break
        chosen.append(path)
    if not chosen:
        raise UserError(
            f"the standard library has no source text at {root}",
            why="this Python was installed without it",
            fix="write data.source=text data.path=FILES, or data.source=synthetic",
        )
    return tuple(chosen)


def _modules_below(folder: Path) -> Iterator[Path]:
    """All modules in the order of their sorted paths. Whoever stops early has looked into few
    folders, and installed packages, which are thousands of files, are not looked at."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name in STDLIB_EXCLUDED:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _modules_below(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield Path(entry.path)


def _matches(pattern: str, source: str) -> Iterator[Path]:
    path = user_path(pattern)
    # An existing path is taken by its name even where that looks like a glob.
    roots = [path] if path.exists() else map(Path, glob.iglob(str(path), recursive=True))
    for root in roots:
        if root.is_dir():
            yield from _files_below(root, source)
        elif root.is_file():
            yield root
        else:
            raise UserError(
                f"data.path names {root}, which is no plain file",
                why="data is read more than once, and a pipe or a device gives it once at most",
                fix="write it to a file and name that: data.path=FILES",
            )


def _files_below(root: Path, source: str) -> Iterator[Path]:
    for path in root.rglob("*"):
        # Hidden directories hold tools' own files (.git, .venv), not the user's text.
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if has_suffix(path.name, source) and not hidden and path.is_file():
            yield path
