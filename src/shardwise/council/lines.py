"""Messages on a connection: one JSON object a line."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

# The addresses and spans of a thousand ranks take a few MB.
_MOST_BYTES = 256 * 2**20


class MessageReader:
    """Cuts what arrives on a connection into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are whole by now. ValueError for anything else."""
        self._rest += data
        if len(self._rest) > _MOST_BYTES:
            raise ValueError("a message is too long")
        *whole, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        found = [json.loads(line) for line in whole]
        if not all(isinstance(each, dict) for each in found):
            raise ValueError("a message is no JSON object")
        return found


def send_line(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def watch_for_silence(connection: socket.socket, patience_s: float) -> None:
    """Let the kernel close a connection whose other side has been silent for so long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes, between = 5, max(1, round(patience_s / 10))
    options = {
        "TCP_KEEPIDLE": max(1, round(patience_s / 2)),
        "TCP_KEEPINTVL": between,
        "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": round(1000 * patience_s),
    }
    for name, value in options.items():
        # Not every system has all of them.
        if (number := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, number, value)


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT; ValueError for anything else."""
    host, found, port = text.rpartition(":")
    if not (found and host and port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host, int(port)
