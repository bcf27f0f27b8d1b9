"""The uses of private names that a run can do without, and when it does without them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, Literal

from shardwise.errors import ExitCode, UserError, brief

PUBLIC_ONLY = "SHARDWISE_PUBLIC_ONLY"
"""The environment variable that turns all parts off. Ranks whose values differ do not start."""

Package = Literal["torch", "transformers"]
# The oldest and the newest minor release that tests/unit/internals has run on.
TESTED: dict[Package, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 11), (2, 15)),
    "transformers": ((5, 10), (5, 23)),
}


class Changed(Exception):
    """A private part is not what shardwise takes it for."""


@dataclass(frozen=True, slots=True)
class Part:
    """One use of private names that has a public path."""

    name: str
    """What a run gains from it, as messages name it."""

    package: Package
    check: Callable[[], object]
    """Raises where an assumption does not hold; it is quick, since every run calls it."""


def _check_in(module: str, function: str) -> Callable[[], object]:
    """A check that is imported when it is called: the import itself may be what fails."""

    def check() -> object:
        return getattr(import_module(f"shardwise.internals.{module}"), function)()

    return check


COPIES = Part("our copies around collectives", "torch", _check_in("fsdp2", "check_copies"))
GATHERS = Part("gathers in place", "torch", _check_in("fsdp2", "check_gathers"))
REDUCTIONS = Part("reductions in shared memory", "torch", _check_in("fsdp2", "check_reductions"))
SUMS = Part("kept residual sums", "torch", _check_in("inductor", "check_passes"))
CHANGES = Part(
    "recompute after changes in place", "torch", _check_in("dispatch_mode", "check_kept")
)
RESTARTS = Part("restarts only where they help", "torch", _check_in("elastic_agent", "check_agent"))
CALLS = Part("profiles by axis", "torch", _check_in("collective_calls", "check_calls"))
POSITIONS = Part(
    "no search for packed sequences", "transformers", _check_in("hugging_face", "check_positions")
)
PARTS = (COPIES, GATHERS, REDUCTIONS, SUMS, CHANGES, RESTARTS, CALLS, POSITIONS)


def is_open(part: Part) -> bool:
    """Whether a run may use this part."""
    return why_public(part) is None


def why_public(part: Part) -> str | None:
    """Why a run takes the public path instead; None: it does not."""
    if os.environ.get(PUBLIC_ONLY, "0") not in ("", "0"):
        return f"{PUBLIC_ONLY} is set"
    return _why_unknown(part.package) or _what_changed(part)


def public_note(parts: Sequence[Part]) -> str | None:
    """One line about those of `parts` that are off; None where none is."""
    off: dict[str, list[str]] = {}
    for part in parts:
        if reason := why_public(part):
            off.setdefault(reason, []).append(part.name)
    told = (f"{', '.join(names)} ({reason})" for reason, names in off.items())
    return f"public paths instead of {'; '.join(told)}" if off else None


def no_public_path(package: Package, purpose: str, error: ImportError) -> UserError:
    """The error for a private name that is gone and has no public form."""
    oldest, newest = map(_dotted, TESTED[package])
    return UserError(
        f"{purpose} does not work with {package} {version(package)}",
        why=brief(error),
        fix=f"install {package} {oldest} to {newest}",
        code=ExitCode.ENVIRONMENT,
    )


@cache
def _why_unknown(package: Package) -> str | None:
    installed = version(package)
    oldest, newest = TESTED[package]
    found = _minor(installed)
    if found > newest:
        return f"{package} {installed} is newer than {_dotted(newest)}, the newest that was tested"
    if found < oldest:
        return f"{package} {installed} is older than {_dotted(oldest)}, the oldest that was tested"
    return None


@cache
def _what_changed(part: Part) -> str | None:
    try:
        part.check()
    except (Changed, AttributeError, ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("shardwise"):
            raise
        return f"{part.package} {version(part.package)} has changed: {brief(error)}"
    return None


def _minor(installed: str) -> tuple[int, int]:
    found: Any = re.match(r"(\d+)\.(\d+)", installed)
    return int(found[1]), int(found[2])


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
