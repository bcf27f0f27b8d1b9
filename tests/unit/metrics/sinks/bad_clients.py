"""Clients that no server likes, ten thousand of them if asked."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

Address = tuple[str, int]

HUGE_LINE = b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"
HUGE_HEADER = b"GET /metrics HTTP/1.1\r\nX: " + b"b" * 100_000 + b"\r\n\r\n"
MANY_HEADERS = b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n"
PIPELINE = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 200
BODY = b"POST /metrics HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 1000
CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n"
HALF = b"GET /metrics HTTP/1.1\r\nHost:"
WRONG = (
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /metrics\r\n\r\n",
    b"GET  /metrics  HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/9.9\r\n\r\n",
    b"DELETE /metrics HTTP/1.1\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
    b"GET /metrics/ HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200


def connect(address: Address, timeout: float = 5.0) -> socket.socket:
    return socket.create_connection(address, timeout=timeout)


def talk(address: Address, request: bytes, *, reset: bool = False, listen: bool = True) -> None:
    """Send, perhaps listen a little, and leave: politely, or with a reset."""
    with suppress(OSError), connect(address) as client:
        client.sendall(request)
        if listen:
            client.recv(4096)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def behaviours(address: Address, seed: int) -> Callable[[], None]:
    """One of the ways to be bad, by a seed."""
    pick = random.Random(seed)
    garbage = os.urandom(pick.randrange(1, 4000))
    ways: list[Callable[[], None]] = [
        lambda: talk(address, pick.choice(WRONG)),
        lambda: talk(address, garbage, listen=False),
        lambda: talk(address, garbage + b"\r\n\r\n"),
        lambda: talk(address, TLS_HELLO, listen=False),
        lambda: talk(address, HALF, listen=False),
        lambda: talk(address, HALF, listen=False, reset=True),
        lambda: talk(address, b"", listen=False),
        lambda: talk(address, PIPELINE, listen=False, reset=True),
        lambda: talk(address, BODY),
        lambda: talk(address, CHUNKED),
    ]
    # The large ones cost the client most of the time, so that they are rarer.
    if seed % 50 == 0:
        ways = [
            lambda: talk(address, HUGE_LINE),
            lambda: talk(address, HUGE_HEADER, reset=True),
            lambda: talk(address, MANY_HEADERS),
        ]
    return pick.choice(ways)


def bombard(address: Address, count: int, *, slow: int = 50) -> None:
    """`count` bad requests one after the other, while `slow` clients never finish theirs."""
    dawdlers: list[socket.socket] = []
    for seed in range(count):
        if len(dawdlers) < slow:
            with suppress(OSError):
                dawdler = connect(address)
                dawdler.sendall(HALF)
                dawdlers.append(dawdler)
        behaviours(address, seed)()
        if seed % 100 == 0:
            dawdlers = [each for each in dawdlers if _one_more_byte(each)]
    for dawdler in dawdlers:
        dawdler.close()


def _one_more_byte(client: socket.socket) -> bool:
    """A slow client that keeps its connection busy, while it can."""
    try:
        client.sendall(b"x")
    except OSError:
        client.close()
        return False
    return True


def get(address: Address, path: str = "/metrics", timeout: float = 10.0) -> tuple[int, bytes]:
    """A client as it should be: status and body."""
    with connect(address, timeout) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = b""
        while part := client.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body
