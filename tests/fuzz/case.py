"""What one case is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


def nothing_more(scratch: Path) -> str:
    """Nothing is asked of what a command has written."""
    return ""


@dataclass
class Case:
    """What to run in the scratch directory, and what must still be there afterwards."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    kept: list[Path] = field(default_factory=list)
    fault_of: Callable[[Path], str] = nothing_more
    """What is wrong with what a command that ended well has written; empty where nothing is."""
