"""What becomes of one key, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# `assumed` is what the other tool does where its file is silent.
Fate = Literal["mapped", "changed", "dropped", "assumed"]
FATES: tuple[Fate, ...] = ("mapped", "changed", "dropped", "assumed")
Settings = Mapping[str, Any]


class BadValueError(ValueError):
    """A value that the other tool would refuse too. The message is the reason of its line."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule makes of a value: settings by their path, such as `optim.lr`, and a reason."""

    fate: Fate
    why: str
    settings: Settings = field(default_factory=dict)
    is_other_task: bool = False
    """Without this key the run trains something else, so the user must hear of it."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table: a key of the file as the file spells it, and its outcome."""

    key: str
    value: Any
    outcome: Outcome


def mapped(settings: Settings, why: str) -> Outcome:
    """The same, in our words."""
    return Outcome("mapped", why, settings)


def always(why: str) -> Outcome:
    """What the file asks for is what every run of ours does."""
    return Outcome("mapped", why)


def changed(settings: Settings, why: str) -> Outcome:
    """The nearest that we have; the reason says what differs."""
    return Outcome("changed", why, settings)


def dropped(why: str) -> Outcome:
    """We have nothing like it."""
    return Outcome("dropped", why)


def other_task(why: str) -> Outcome:
    """We have nothing like it, and what is left of the file trains something else."""
    return Outcome("dropped", why, is_other_task=True)
