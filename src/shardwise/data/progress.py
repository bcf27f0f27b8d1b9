"""A line now and then while tokens are made."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardwise.units import format_count

Say = Callable[[str], None]
EVERY_S = 10.0


def silent(text: str) -> None:
    """Say nothing."""


class TokenProgress:
    """Counts documents and tokens, and says both every few seconds."""

    def __init__(self, say: Say, what: str) -> None:
        self._say = say
        self._what = what
        self._num_documents = 0
        self._num_tokens = 0
        self._said_at = time.monotonic()

    def add(self, num_tokens: int) -> None:
        """Count one document."""
        self._num_documents += 1
        self._num_tokens += num_tokens
        now = time.monotonic()
        if now - self._said_at >= EVERY_S:
            self._said_at = now
            tokens = format_count(self._num_tokens)
            self._say(
                f"tokenising: {format_count(self._num_documents)} {self._what}, {tokens} tokens"
            )
