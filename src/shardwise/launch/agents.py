"""What the agents of several nodes tell each other: when they start ranks, and when ranks fail.

torchrun lets each agent count its own failures and judge its own ranks. So ranks of two nodes could
wait for each other under different counts, and a node whose peer is gone would report a closed
connection.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

import torch.distributed as dist

from shardwise.errors import UserError
from shardwise.launch.failure import Passing
from shardwise.launch.group import START_VARIABLE

# Ranks whose peer has failed fail too, within moments. A rank that hangs does not.
_TOGETHER_S = 5.0
# An agent looks at its ranks ten times a second. On a busy machine it may be late.
_ALIVE_WITHIN_S = 20.0
_BEAT_S = 1.0
_POLL_S = 0.05


class Agents:
    """All agents of one start of the ranks, which have a store of this start."""

    def __init__(self, store: dist.Store, number: int, count: int) -> None:
        self.number, self.count = number, count
        self.gone: list[str] = []
        """The nodes whose agents did not answer when ranks had failed."""

        self._store = dist.PrefixStore("agents", store)
        self._next_beat = 0.0

    def begin(self, failures: int) -> int:
        """Let ranks find those of this start alone. Returns the most failures that an agent has
        counted, because one failure may end the ranks of many nodes or of one."""
        if self.number == 0:
            self._store.set("start", uuid4().hex)
        self._store.set(f"name/{self.number}", socket.gethostname())
        self._store.set(f"failures/{self.number}", str(failures))
        os.environ[START_VARIABLE] = self._store.get("start").decode()
        return max(int(self._store.get(f"failures/{one}")) for one in range(self.count))

    def beat(self) -> None:
        """Show the others that this agent is there."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_S
            # Where the node that keeps the store has gone, ranks are about to fail.
            with suppress(dist.DistError):
                self._store.add(f"beat/{self.number}", 1)

    def first_error(self, own: UserError) -> UserError:
        """The error that came first, alike on all nodes whose ranks have failed."""
        if self.count == 1:
            return own
        try:
            return self._settle(own)
        except dist.DistError:
            # The node that keeps the store has gone. Agents cannot meet without it.
            self.gone = ["the node where the agents meet"]
            return own

    def _settle(self, own: UserError) -> UserError:
        place = self._store.add("failed", 1)
        told = {"error": own.to_dict(), "passing": isinstance(own, Passing), "place": place}
        self._store.set(f"error/{self.number}", json.dumps(told))
        beats = self._beats()
        self._wait(_TOGETHER_S, lambda: len(self._failed()) == self.count)
        self._wait(_ALIVE_WITHIN_S, lambda: not self._silent(beats))
        self.gone = [self._store.get(f"name/{one}").decode() for one in self._silent(beats)]
        found = [json.loads(self._store.get(f"error/{one}")) for one in self._failed()]
        # The store may live in this process, so none leaves before the others have read.
        self._store.add("read", 1)
        self._wait(_TOGETHER_S, lambda: self._store.add("read", 0) >= len(found))
        # A closed connection is what the other nodes see of an error that does not pass.
        first = min(found, key=lambda one: (one["passing"], one["place"]))
        kind = Passing if first["passing"] else UserError
        return kind.from_dict(first["error"])

    def _beats(self) -> list[int]:
        return [self._store.add(f"beat/{one}", 0) for one in range(self.count)]

    def _failed(self) -> list[int]:
        return [one for one in range(self.count) if self._store.check([f"error/{one}"])]

    def _silent(self, before: list[int]) -> list[int]:
        """Agents that have neither told an error nor looked at their ranks since."""
        now, failed = self._beats(), self._failed()
        return [one for one in range(self.count) if now[one] == before[one] and one not in failed]

    def _wait(self, limit_s: float, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
