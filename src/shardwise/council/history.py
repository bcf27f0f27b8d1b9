"""The record of a council: what was decided, and what a replay of it follows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ExitCode, UserError


@dataclass(frozen=True, slots=True)
class OuterRound:
    """An outer step: after which step, of which sites, and who joined behind it."""

    step: int
    members: tuple[int, ...]
    joined: tuple[int, ...] = ()
    digest: str = ""
    """The common model before it."""


@dataclass(slots=True)
class Past:
    """What a record says, from its begin to its end."""

    started: tuple[int, ...] = ()
    """The sites that began, where they have."""

    members: set[int] = field(default_factory=set)
    step: int = 0
    rounds: dict[int, OuterRound] = field(default_factory=dict)
    """Rounds by step. Those that a later start has gone back behind are not among them."""

    finished: int = 0
    """The last step, once a site has made it."""

    digest: str = ""
    """The common model at the end."""

    is_exact: bool = True
    """Whether a replay gives the same bits: not where a site that was left behind went on from its
    own memory."""

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Past:
        """What these events say."""
        past = cls()
        for event in events:
            past._take(event)
        return past

    def _take(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "start":
                self.members, self.step = set(event["members"]), event["step"]
                self.started = self.started or tuple(event["members"])
                self.rounds = {s: each for s, each in self.rounds.items() if s <= self.step}
                self.is_exact = self.is_exact and event["exact"]
            case "round":
                members, joined = tuple(event["members"]), tuple(event["joined"])
                found = OuterRound(event["step"], members, joined, event["digest"])
                self.members, self.step = {*members, *joined}, found.step
                self.rounds[found.step] = found
            case "lost":
                self.members.discard(event["site"])
            case "left":
                self.members.discard(event["site"])
                if event["finished"]:
                    self.finished, self.digest = event["step"], event["digest"]


def read_record(path: Path) -> Past:
    """The record at `path`. Its last line may have been cut off."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        return Past.of(json.loads(line) for line in lines[:-1])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read as a record of sites",
            why=str(getattr(error, "strerror", None) or error),
            fix="name the file that `shardwise sites --record FILE` wrote",
            code=ExitCode.ENVIRONMENT,
        ) from error


class CouncilRecord:
    """Appends events to a file, each of which is on disk before anybody hears of it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event."""
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """No event comes any more."""
        self._file.close()
