"""Settings that an axis of the mesh does not go with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class RefusedSetting:
    """A setting that was not shown to give the same numbers beside an axis."""

    setting: str
    """Its path, with the value where only that one is refused."""

    is_asked: Callable[[RunConfig], bool]
    """Whether a run asks for it."""

    why: str

    @property
    def path(self) -> str:
        """What to leave out."""
        return self.setting.partition("=")[0]
