"""The one error that users see, and the exit codes it carries."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

# Two or three lines of a terminal.
_BRIEF = 240


class ExitCode(IntEnum):
    """What the process tells its caller."""

    OK = 0
    CONFIG = 2
    DOES_NOT_FIT = 3
    ENVIRONMENT = 4
    VERIFY_FAILED = 5
    WORKER_DIED = 6
    DIVERGED = 7
    PREEMPTED = 75


def brief(error: BaseException) -> str:
    """The first line of what a library says, cut where it would go on for screens."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF].rstrip()} …"


def printable(text: str) -> str:
    """Text that comes from a file: nothing in it may steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


class UserError(Exception):
    """Something that the user can mend: what is wrong, why, and what to do."""

    def __init__(
        self, what: str, *, why: str = "", fix: str = "", code: ExitCode = ExitCode.CONFIG
    ) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.code = code

    def to_dict(self) -> dict[str, Any]:
        """Plain data, to tell another process."""
        return {"what": self.what, "why": self.why, "fix": self.fix, "code": int(self.code)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> UserError:
        """The inverse of `to_dict`."""
        code = ExitCode(data["code"])
        return cls(data["what"], why=data["why"], fix=data["fix"], code=code)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)
