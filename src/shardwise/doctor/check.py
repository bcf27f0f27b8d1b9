"""A check: one known fault, how to find it, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

Level = Literal["note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
"""Most severe first."""

Subject_contra = TypeVar("Subject_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Check(Generic[Subject_contra]):
    """One known fault. Its fields are given in order, so that a list of checks reads as a table."""

    id: str
    level: Level
    title: str
    why: str
    fix: str
    look: Callable[[Subject_contra], Iterable[str]]
    """The evidence: one text for each place where the fault was found, and none where it was
    not."""

    follows: bool = False
    """Whether the fault usually follows from another one, which then is the cause to look for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that was found."""

    check: Check[Any]
    evidence: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        check = self.check
        return {
            "id": check.id,
            "level": check.level,
            "title": check.title,
            "evidence": self.evidence,
            "why": check.why,
            "fix": check.fix,
        }


def find_faults(checks: Sequence[Check[Subject_contra]], subject: Subject_contra) -> list[Finding]:
    """What all these checks find, in their order."""
    return [Finding(check, text) for check in checks for text in check.look(subject)]


def by_severity(findings: Sequence[Finding]) -> list[Finding]:
    """Errors first. Of one level, causes come before what follows from them."""
    return sorted(findings, key=lambda each: (LEVELS.index(each.check.level), each.check.follows))
