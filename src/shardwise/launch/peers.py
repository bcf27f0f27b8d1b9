"""The ranks of one start before they form a process group. They settle things through a store.

A store takes bytes of any length. So it also works for ranks that differ in what decides the shapes
of tensors, and a rank that has failed can still say why.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from shardwise.errors import ExitCode, UserError
from shardwise.launch.group import TIMEOUT, open_store
from shardwise.training.agree import Account, find_disagreement

# The first thing that ranks settle. Errors that come before it are reported here.
IDENTITY = "identity"
# Once a rank has failed, the others have this long to arrive. Then those that are there get the
# error.
_GRACE_S = 10.0
# How long a rank that has failed waits for others to tell. They may never come.
_REFUSAL_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25
_REFUSED, _VERDICT = "refused", "verdict"
Decide = Callable[[Sequence[Account]], UserError | None]


class AbsentError(UserError):
    """Some ranks have not arrived."""


class Peers:
    """All ranks of this start, including this one."""

    def __init__(self, store: dist.Store, timeout: timedelta = TIMEOUT) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.store = store
        self._timeout_s = timeout.total_seconds()

    def settle(self, matter: str, mine: Account, decide: Decide) -> None:
        """Rank 0 reads all accounts and decides. Its error is raised on every rank."""
        store = dist.PrefixStore(matter, self.store)
        store.set(str(self.rank), mine.to_json())
        if mine.error is not None:
            store.set(_REFUSED, "")
        if self.rank == 0:
            found = self._decide(store, decide)
            store.set(_VERDICT, json.dumps(None if found is None else found.to_dict()))
        else:
            if not _wait(store, [_VERDICT], self._timeout_s):
                raise self._absent([0])
            told = json.loads(store.get(_VERDICT))
            found = None if told is None else UserError.from_dict(told)
        if found is not None:
            self._part(store)
            raise found

    def send(self, name: str, text: str) -> None:
        """Give all ranks a text."""
        self.store.set(name, text)

    def receive(self, name: str) -> str:
        """The text that the first rank gives. An error that comes before it is raised on every
        rank."""
        refused = f"{IDENTITY}/{_REFUSED}"
        if not _wait(self.store, [name], self._timeout_s, unless=refused):
            if self.store.check([refused]):
                self.settle(IDENTITY, Account(rank=self.rank), _first_error)
            raise self._absent([0])
        return self.store.get(name).decode()

    def _decide(self, store: dist.Store, decide: Decide) -> UserError | None:
        names = [str(rank) for rank in range(self.world_size)]
        came = _wait(store, names, self._timeout_s, unless=_REFUSED)
        if not came and store.check([_REFUSED]):
            _wait(store, names, _GRACE_S)
        elif not came:
            return self._absent(
                [rank for rank, name in enumerate(names) if not store.check([name])]
            )
        accounts = [
            Account.from_json(store.get(name).decode()) for name in names if store.check([name])
        ]
        try:
            return decide(accounts)
        except UserError as error:
            return error

    def _part(self, store: dist.Store) -> None:
        """Leave. The store may live in rank 0's process, so rank 0 leaves after the others have
        read everything."""
        others = [f"read/{rank}" for rank in range(1, self.world_size)]
        if self.rank == 0:
            _wait(store, others, _GRACE_S)
        else:
            store.set(f"read/{self.rank}", "")

    def _absent(self, ranks: list[int]) -> AbsentError:
        named = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
        return AbsentError(
            f"rank {named} did not arrive within {self._timeout_s:.0f} s",
            why=f"the launcher has started {self.world_size} ranks, which wait for each other",
            fix="look for an error on the nodes of these ranks, and start all nodes again",
            code=ExitCode.ENVIRONMENT,
        )


def refuse(error: UserError) -> UserError:
    """Tell all ranks about an error that came before they met. Returns what each of them raises."""
    timeout = timedelta(seconds=_REFUSAL_S)
    try:
        peers = Peers(open_store(timeout), timeout)
    except UserError:
        return error  # nobody is there to be told
    mine = Account(rank=peers.rank, error=error.to_dict())
    try:
        peers.settle(IDENTITY, mine, _first_error)
    except (AbsentError, dist.DistError):
        return error
    except UserError as verdict:
        return verdict
    return error


def _first_error(accounts: Sequence[Account]) -> UserError | None:
    return find_disagreement(accounts, [])


def _wait(store: dist.Store, names: list[str], timeout_s: float, unless: str | None = None) -> bool:
    """Whether all keys were set in time, and before the key `unless`.

    It polls, because Python handles no signal while it blocks inside the store.
    """
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while names and not store.check(names):
        if time.monotonic() > deadline or (unless is not None and store.check([unless])):
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True
