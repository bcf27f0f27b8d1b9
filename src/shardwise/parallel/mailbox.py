"""What a rank holds ready for the ranks of other sites, and how it fetches what they hold.

Plain TCP between two ranks at a time. A process group would tie all sites together: when one of
them dies, the group is lost to the others. Numbers travel in fp32, in the order of the machine.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.council.lines import watch_for_silence
from shardwise.parallel.spans import RowSpan, Shared, shared

Vector = npt.NDArray[np.float32]
_MOST_REQUEST = 64 * 2**20
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank of another site listens, and what it holds."""

    host: str
    port: int
    spans: Sequence[RowSpan]

    def to_list(self) -> list[Any]:
        """Plain data for a message."""
        return [self.host, self.port, [[span.start, span.length] for span in self.spans]]

    @classmethod
    def from_list(cls, data: Sequence[Any]) -> Address:
        """The inverse of `to_list`."""
        host, port, spans = data
        return cls(host, port, [RowSpan(*each) for each in spans])


@dataclass(slots=True)
class _Post:
    vectors: Sequence[Vector]
    about: Mapping[str, Any]
    num_takers: int
    sent_bytes: int = 0
    num_taken: int = 0


class Mailbox:
    """Hands out vectors to ranks of other sites."""

    def __init__(self, host: str, patience_s: float) -> None:
        self.host, self._patience_s = host, patience_s
        self._posts: dict[str, _Post] = {}
        self._over: set[str] = set()
        self._changed = threading.Condition()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        threading.Thread(target=self._accept, daemon=True, name="mailbox").start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def post(
        self,
        key: str,
        vectors: Sequence[Vector],
        about: Mapping[str, Any],
        *,
        num_takers: int = 0,
    ) -> None:
        """Hold vectors ready, which nobody changes meanwhile."""
        with self._changed:
            self._posts[key] = _Post(vectors, about, num_takers)
            self._over.discard(key)
            self._changed.notify_all()

    def take_back(self, key: str) -> int:
        """Hold them no longer. Returns the bytes of them that were sent."""
        with self._changed:
            post = self._posts.pop(key, None)
            self._over.add(key)
            self._changed.notify_all()
        return 0 if post is None else post.sent_bytes

    def is_awaited(self) -> bool:
        """Whether somebody has still to fetch what is held for so many."""
        with self._changed:
            return any(post.num_taken < post.num_takers for post in self._posts.values())

    def close(self) -> None:
        """Listen no longer."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(self._patience_s)
            watch_for_silence(connection, self._patience_s)
            with connection.makefile("rb") as reader:
                asked = json.loads(reader.readline(_MOST_REQUEST))
            post = self._find(asked["key"])
            connection.sendall(json.dumps(post.about).encode() + b"\n")
            for vector in post.vectors:
                parts = [vector[start : start + length] for start, length in asked["parts"]]
                data = _bytes_of(np.concatenate(parts))
                for first in range(0, len(data), _CHUNK):
                    chunk = data[first : first + _CHUNK]
                    connection.sendall(chunk)
                    with self._changed:
                        post.sent_bytes += len(chunk)
            with self._changed:
                post.num_taken += 1

    def _find(self, key: str) -> _Post:
        """What is held under a key. Whoever asks may have heard of it before it is there."""
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._posts or key in self._over, self._patience_s
            )
            return self._posts[key]


def fetch(
    source: Address,
    key: str,
    own: Sequence[RowSpan],
    into: Sequence[Vector],
    patience_s: float,
) -> dict[str, Any]:
    """Fill vectors with what another rank has of these spans. Returns what it says about them.
    OSError where it does not give all."""
    found = list(shared(own, source.spans))
    if not found:
        return {}
    with socket.create_connection((source.host, source.port), patience_s) as connection:
        connection.settimeout(patience_s)
        watch_for_silence(connection, patience_s)
        parts = [[each.theirs, each.length] for each in found]
        connection.sendall(json.dumps({"key": key, "parts": parts}).encode() + b"\n")
        with connection.makefile("rb", buffering=_CHUNK) as reader:
            head = reader.readline()
            if not head:
                raise ConnectionError(f"{source.host}:{source.port} does not have {key}")
            for vector in into:
                _fill(vector, found, reader)
    about: dict[str, Any] = json.loads(head)
    return about


def _fill(vector: Vector, parts: Sequence[Shared], reader: Any) -> None:
    for part in parts:
        target = _bytes_of(vector[part.mine : part.mine + part.length])
        place = 0
        while place < len(target):
            count = reader.readinto(target[place:])
            if not count:
                raise ConnectionError("the other site closed the connection")
            place += count


def _bytes_of(vector: Vector) -> memoryview:
    """The memory of a vector. numpy's types do not say that it is a buffer before Python 3.12."""
    buffer: Any = vector.view(np.uint8)
    return memoryview(buffer)
