"""A page on the disk: written whole or not at all, over nothing but an older one of its kind."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from shardwise.errors import ExitCode, UserError
from shardwise.files import free_name, open_file, replace_file
from shardwise.report.page import PageKind

_HEAD_BYTES = 2000


def write_page(kind: PageKind, text: str, target: Path) -> int:
    """Replace the file; returns its size."""
    # Names and messages come from files: half of a surrogate pair must not end the page.
    data = text.encode("utf-8", "replace")
    try:
        replace_file(target, data)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror}",
            fix=f"write {kind.option} FILE in a directory that you may write to",
            code=ExitCode.ENVIRONMENT,
        ) from error
    return len(data)


def validate_target(kind: PageKind, target: Path) -> None:
    """Raise where writing would fail, or would replace something that is no such page."""
    if not target.parent.is_dir():
        raise UserError(
            f"there is no directory {target.parent} to write {target.name} into",
            fix=f"mkdir -p {quote(str(target.parent))}, or write {kind.option} "
            f"{quote(target.name)}",
        )
    if target.exists() and (why := _why_another(kind, target)):
        raise UserError(
            f"{target} exists and is not {kind.noun}, so it was not replaced",
            why=why,
            fix=f"write {kind.option} {quote(str(free_name(target)))}, or another new file",
        )


def _why_another(kind: PageKind, target: Path) -> str | None:
    try:
        with open_file(target) as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    return None if kind.wrote(head) else "it was not written by this command"
