"""The link between two sites: its rate in both directions, and how long a message takes.

One end listens, the other one asks. A transfer lasts for some seconds, so that no buffer on the way
hides the rate.
"""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.facts.collective_cost import TCP_SHARE

_CHUNK = bytes(1 << 16)
_ROUNDS = 20
_PATIENCE_S = 60.0
# TCP needs a part of the time to find the rate.
_WARM_UP = 0.25


@dataclass(frozen=True, slots=True)
class SiteLinkFound:
    """What a link between two sites carries."""

    sent_bytes_per_s: float
    """From the end that asked to the one that listened, of data."""

    received_bytes_per_s: float
    delay_s: float
    """Half of a round trip."""

    @property
    def gbits(self) -> float:
        """The rate of the slower direction with TCP's headers, as `cluster.site_link` has it."""
        return min(self.sent_bytes_per_s, self.received_bytes_per_s) * 8e-9 / TCP_SHARE

    @property
    def settings(self) -> str:
        """What a plan is told of it."""
        delay = f"cluster.site_delay_ms={self.delay_s * 1000:.1f}"
        return f"cluster.site_link={self.gbits:.3g} {delay}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "site_link": self.gbits, "settings": self.settings}


def serve_one(listener: socket.socket) -> None:
    """Answer the other end until it says that it is done."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_PATIENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _answer(connection) == "done":
                return


def _answer(connection: socket.socket) -> str:
    with connection.makefile("rb") as reader, suppress(OSError, ValueError, KeyError):
        asked = json.loads(reader.readline(1000))
        match asked["what"]:
            case "ping":
                while word := reader.read(1):
                    connection.sendall(word)
            case "send":
                told = json.dumps({"rate": _receive(reader, asked["seconds"])})
                connection.sendall(told.encode() + b"\n")
            case "receive":
                _send(connection, asked["seconds"])
        return str(asked["what"])
    return ""


def measure_link(host: str, port: int, seconds: float) -> SiteLinkFound:
    """Measure the link to the site that listens there."""
    with _asking(host, port, "ping", seconds) as connection:
        delays = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            connection.sendall(b"x")
            if not connection.recv(1):
                raise ConnectionError("the other site closed the connection")
            delays.append(time.perf_counter() - began)
    with _asking(host, port, "send", seconds) as connection, connection.makefile("rb") as reader:
        sender = threading.Thread(target=_send, args=(connection, seconds), daemon=True)
        sender.start()
        sent = json.loads(reader.readline(1000))["rate"]
        sender.join()
    with _asking(host, port, "receive", seconds) as connection, connection.makefile("rb") as reader:
        received = _receive(reader, seconds)
    with _asking(host, port, "done", seconds):
        pass
    return SiteLinkFound(sent, received, statistics.median(delays) / 2)


def _asking(host: str, port: int, what: str, seconds: float) -> socket.socket:
    connection = socket.create_connection((host, port), _PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(json.dumps({"what": what, "seconds": seconds}).encode() + b"\n")
    return connection


def _send(connection: socket.socket, seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    with suppress(OSError):
        while time.perf_counter() < deadline:
            connection.sendall(_CHUNK)
        connection.shutdown(socket.SHUT_WR)


def _receive(reader: Any, seconds: float) -> float:
    """Bytes a second that arrived, without the first moments, in which TCP finds the rate."""
    began = time.perf_counter()
    marks = [(began, 0)]
    while data := reader.read1(1 << 20):
        marks.append((time.perf_counter(), marks[-1][1] + len(data)))
    first = next((mark for mark in marks if mark[0] - began >= _WARM_UP * seconds), marks[0])
    last = marks[-1]
    if last[0] <= first[0]:
        raise ConnectionError("nothing arrived")
    rate: float = (last[1] - first[1]) / (last[0] - first[0])
    return rate
