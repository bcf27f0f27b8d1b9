"""A thread that watches the ranks of a node, and ends them where they hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from shardwise.launch.hang import Hang, Judge
from shardwise.launch.lookout import Lookout, Seen
from shardwise.launch.stopping import stop_ranks

# How often ranks are looked at and signals are passed on.
_POLL_S = 0.1
Say = Callable[[str], None]


class Relay(Protocol):
    """Passes requests to stop on."""

    def deliver(self, ranks: list[Seen]) -> None:
        """Tell these ranks, if there is something to tell."""


class Watchdog:
    """Watches while its block runs. `hang` says how the ranks hung, where they did."""

    def __init__(
        self,
        lookout: Lookout,
        say: Say,
        *,
        timeout_s: float | None = None,
        relay: Relay | None = None,
    ) -> None:
        self.hang: Hang | None = None
        self._lookout = lookout
        self._timeout_s = timeout_s
        self._relay = relay
        self._say = say
        self._lost: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def wait_for_hang(self) -> Hang | None:
        """How the ranks hang, once they do; None where the block ended first."""
        judge = Judge(self._timeout_s)
        while not self._over.wait(_POLL_S):
            ranks = self._lookout.look()
            if self._relay is not None:
                self._relay.deliver(ranks)
            self._count_lost(ranks)
            if (hang := judge.judge(ranks)) is not None:
                return hang
        return None

    def _watch(self) -> None:
        while (hang := self.wait_for_hang()) is not None:
            self.hang = hang
            for pid in stop_ranks(self._lookout, hang):
                self._say(
                    f"ALERT: process {pid} is stuck in the kernel, and SIGKILL does not end it"
                )

    def _count_lost(self, ranks: list[Seen]) -> None:
        """Report signs of life that could not be written, once they can be written again."""
        for one in ranks:
            lost = one.sign.lost if one.sign else 0
            if lost > self._lost.get(one.pid, 0):
                self._lost[one.pid] = lost
                self._say(f"ALERT: {lost} heartbeats of rank {one.rank} could not be written")
