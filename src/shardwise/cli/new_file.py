"""A file that a command makes, where nothing is overwritten."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from shardwise.errors import UserError
from shardwise.files import free_name

_YAML = (".yaml", ".yml")


def validate_new_yaml(target: Path) -> None:
    """Raise where no YAML can be written there, before anybody is asked what is to be in it."""
    if target.suffix.lower() not in _YAML:
        raise UserError(
            f"{target} is no name for a YAML file, and other commands would not read it",
            fix=f"name it {quote(str(target.with_name(target.stem + _YAML[0])))}",
        )
    if target.exists():
        raise _exists(target)


def write_new_file(target: Path, text: str) -> None:
    """Write `text` to a file that must not exist yet."""
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise _exists(target) from error
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror}",
            fix="name a file in a directory that you may write to"
            if target.parent.is_dir()
            else f"mkdir -p {quote(str(target.parent))}",
        ) from error


def _exists(target: Path) -> UserError:
    return UserError(
        f"{target} exists already, and is left as it is",
        fix=f"name another file, such as {quote(str(free_name(target)))}",
    )
