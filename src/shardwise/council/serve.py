"""The process of a council: connections of sites, the clock, and the record."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from shardwise.council.council import Council, Reply
from shardwise.council.history import CouncilRecord
from shardwise.council.lines import MessageReader, send_line, watch_for_silence

_TICK_S = 0.2
_SEND_S = 10.0


class Served:
    """A council on a socket that listens."""

    def __init__(
        self,
        council: Council,
        listener: socket.socket,
        record: CouncilRecord,
        tell: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.council = council
        self._record, self._tell = record, tell
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener
        self._lines: dict[socket.socket, MessageReader] = {}
        self._sites: dict[socket.socket, int] = {}
        self._jobs: dict[int, list[str]] = {}
        """The jobs that have called themselves a site. The newest one is it: a job that died may
        have left a connection behind."""

        self._asked: dict[int, Any] = {}
        """The number of each site's last message, which replies name."""

    @property
    def is_quiet(self) -> bool:
        """Whether no site is connected."""
        return not self._sites

    def step(self) -> None:
        """Hear what has arrived, and answer."""
        for key, _ in self._selector.select(_TICK_S):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._hear(key.fileobj)  # type: ignore[arg-type]
        self._answer(self.council.tick(time.monotonic()))

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_SEND_S)
        watch_for_silence(connection, self.council.patience_s)
        self._lines[connection] = MessageReader()
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        if connection not in self._lines:
            return
        try:
            data = connection.recv(1 << 20)
            messages = self._lines[connection].feed(data) if data else None
        except (OSError, ValueError):
            messages = None
        if messages is None:
            self._close(connection)
            return
        for message in messages:
            site: Any = message.get("site")
            if (refused := self._why_not(site, message)) is not None:
                with suppress(OSError):
                    send_line(connection, {**refused, "number": message.get("number")})
                self._close(connection)
                return
            self._take(connection, site)
            self._asked[site] = message.get("number")
            try:
                replies = self.council.hear(site, message, time.monotonic())
            except (KeyError, TypeError):
                self._close(connection)
                return
            self._answer(replies)

    def _why_not(self, site: Any, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Why a message is not heard; None where it is."""
        if not isinstance(site, int) or not 0 <= site < self.council.num_sites:
            return {"say": "stranger", "num_sites": self.council.num_sites}
        job, known = str(message.get("job")), self._jobs.setdefault(site, [])
        if job not in known:
            known.append(job)
        return None if job == known[-1] else {"say": "replaced"}

    def _take(self, connection: socket.socket, site: int) -> None:
        """The newest connection of a site is the one that counts."""
        for other, owner in list(self._sites.items()):
            if owner == site and other is not connection:
                del self._sites[other]
                self._close(other)
        self._sites[connection] = site

    def _close(self, connection: socket.socket) -> None:
        if connection not in self._lines:
            return
        self._selector.unregister(connection)
        del self._lines[connection]
        connection.close()
        site = self._sites.pop(connection, None)
        if site is not None:
            self._answer(self.council.lose(site))

    def _answer(self, replies: list[Reply]) -> None:
        """Write what was decided, and then tell it."""
        events, self.council.events = self.council.events, []
        for event in events:
            told = {"time": time.time(), **event}
            self._record.write(told)
            self._tell(told)
        for site, reply in replies:
            for connection, owner in list(self._sites.items()):
                if owner == site:
                    try:
                        send_line(connection, {**reply, "number": self._asked.get(site)})
                    except OSError:
                        self._close(connection)
