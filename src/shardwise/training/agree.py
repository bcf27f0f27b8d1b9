"""Whether all ranks agree: who differs from rank 0, in what, and the values of both.

Each rank gives an account of itself: values by name, in topics. This module knows neither where the
values come from nor how they are sent.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.errors import ExitCode, UserError
from shardwise.parallel.mesh import World

Values = dict[str, Any]
# Differences usually have one cause. More of them than this only hide it.
_MOST_SHOWN = 8
_LONGEST_VALUE = 80
_NOT_SET = "not set"


@dataclass(frozen=True, slots=True)
class Topic:
    """What values are about, and what a difference in them means."""

    name: str
    code: ExitCode
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The values of one rank, or the error that keeps it from having any."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    topics: dict[str, Values] = field(default_factory=dict)
    """Values by the topic's name. A rank that leaves a topic out is not asked about it."""

    error: dict[str, Any] | None = None

    def to_json(self) -> str:
        """The account as it is sent to another rank."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Account:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))

    @property
    def name(self) -> str:
        """The rank's name in messages."""
        return f"{self.host} (rank {self.rank})"


def find_disagreement(accounts: Sequence[Account], topics: Sequence[Topic]) -> UserError | None:
    """One error for all ranks: what some of them failed at, else how they differ from the first."""
    if any(account.error for account in accounts):
        return _joint_error(accounts)
    shown: dict[tuple[str, str, str], str] = {}
    first_topic: Topic | None = None
    for topic in topics:
        found = _differences(accounts, topic.name)
        if found and first_topic is None:
            first_topic = topic
        shown |= found
    if first_topic is None:
        return None
    lines = list(shown.values())
    more = [f"and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
    listed = [f"    {line}" for line in (*lines[:_MOST_SHOWN], *more)]
    return UserError(
        "\n".join(["the ranks were not started alike:", *listed]),
        why="they train one model together; nothing was trained",
        fix=first_topic.fix,
        code=first_topic.code,
    )


def settle_in_group(
    world: World,
    topics: Sequence[Topic],
    mine: Mapping[str, Values],
    error: UserError | None = None,
) -> None:
    """Raise on all ranks of the world where any of them failed or differs."""
    failure = None if error is None else error.to_dict()
    account = Account(rank=world.rank, topics=dict(mine), error=failure)
    texts = world.gather(account.to_json())
    found = find_disagreement([Account.from_json(text) for text in texts], topics)
    if found is not None:
        raise found


def _joint_error(accounts: Sequence[Account]) -> UserError:
    """The first rank's error. It names its rank unless all ranks have the same."""
    failed = [account for account in accounts if account.error]
    error = UserError.from_dict(failed[0].error or {})
    if all(account.error == failed[0].error for account in accounts):
        return error
    what = f"{failed[0].name}: {error.what}"
    return UserError(what, why=error.why, fix=error.fix, code=error.code)


def _differences(accounts: Sequence[Account], topic: str) -> dict[tuple[str, str, str], str]:
    """A sentence for each value that differs from the first rank's, once for each host."""
    told = [account for account in accounts if topic in account.topics]
    found: dict[tuple[str, str, str], str] = {}
    for account in told[1:]:
        theirs, ours = account.topics[topic], told[0].topics[topic]
        for name in sorted(theirs.keys() | ours.keys()):
            here, there = ours.get(name), theirs.get(name)
            if here != there:
                line = f"{account.name}: {name} is {_show(there)} there, "
                line += f"{_show(here)} on {told[0].name}"
                found.setdefault((name, account.host, _show(there)), line)
    return found


def _show(value: Any) -> str:
    if value is None:
        return _NOT_SET
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
