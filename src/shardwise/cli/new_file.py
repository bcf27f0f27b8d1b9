"""A file that a command makes, where nothing is overwritten."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from shardwise.errors import UserError
from shardwise.files import free_name


def write_new_file(target: Path, text: str) -> None:
    """Write `text` to a file that must not exist yet."""
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(
            f"{target} exists already, and is left as it is",
            fix=f"name another file, such as {quote(str(free_name(target)))}",
        ) from error
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror}",
            fix="name a file in a directory that you may write to"
            if target.parent.is_dir()
            else f"mkdir -p {quote(str(target.parent))}",
        ) from error
