"""What a site asks the council. A lost connection is made again, as often as it takes."""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shardwise.council.lines import MessageReader, parse_address, send_line, watch_for_silence

_AGAIN_S = 0.5
_CONNECT_S = 10.0


class Asker:
    """One site's connection to the council."""

    def __init__(self, address: str, site: int, patience_s: float) -> None:
        self._address, self._site, self._patience_s = parse_address(address), site, patience_s
        self._connection: socket.socket | None = None
        self._lines = MessageReader()
        self._message: dict[str, Any] | None = None
        self._asked_at = 0.0
        self.fault: str | None = None
        """Why nothing was heard at the last try; None while there is a connection."""
        self._number = 0
        # Of two jobs that call themselves one site the council tells the older one so.
        self._job = secrets.token_hex(8)

    def ask(self, message: Mapping[str, Any]) -> None:
        """Ask something; `answer` has the reply later."""
        self._number += 1
        own = {"site": self._site, "job": self._job, "number": self._number}
        self._message = {**own, **message}
        self._send()

    def answer(self, wait_s: float) -> dict[str, Any] | None:
        """The reply, if it comes within so long."""
        if self._message is None:
            raise RuntimeError("nothing was asked")
        if self._connection is None:
            time.sleep(min(wait_s, _AGAIN_S))
            self._send()
        if self._connection is None or not self._is_readable(self._connection, wait_s):
            return None
        try:
            data = self._connection.recv(1 << 20)
            found = self._lines.feed(data) if data else None
            self.fault = None if data else "the connection was closed"
        except (OSError, ValueError) as error:
            found, self.fault = None, f"{getattr(error, 'strerror', None) or error}"
        if found is None:
            self._close()
            return None
        # A reply to an earlier message may come late, such as that it is too late for it.
        replies = [each for each in found if each.get("number") == self._number]
        if not replies:
            return None
        self._message = None
        return replies[-1]

    def _is_readable(self, connection: socket.socket, wait_s: float) -> bool:
        readable, _, _ = select.select([connection], [], [], wait_s)
        # The link may have been cut, so that neither side hears of the other. What was asked may
        # be asked again.
        if not readable and time.monotonic() - self._asked_at > self._patience_s:
            self._close()
        return bool(readable)

    def _send(self) -> None:
        try:
            if self._connection is None:
                self._connection = socket.create_connection(self._address, _CONNECT_S)
                watch_for_silence(self._connection, self._patience_s)
                self._lines = MessageReader()
            self.fault = None
            if self._message is not None:
                send_line(self._connection, self._message)
            self._asked_at = time.monotonic()
        except OSError as error:
            self.fault = f"{error.strerror or error}"
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.close()
        self._connection = None

    def close(self) -> None:
        """Ask nothing more."""
        self._close()


def own_host(address: str) -> str:
    """The address of this machine that the council's host sees."""
    host, port = parse_address(address)
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel only chooses a route.
        probe.connect(place)
        found: str = probe.getsockname()[0]
    return found
