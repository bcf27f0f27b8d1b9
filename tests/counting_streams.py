"""Streams that only keep count. On a CPU nothing runs beside anything else, so a wait that is
missing would not show; here every stream knows what has happened before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

Past = dict[str, int]


class CountingStream:
    """Knows how much of each stream, itself among them, has happened before now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.past: Past = {name: 0}

    def work(self) -> Past:
        self.past[self.name] += 1
        return dict(self.past)

    def record_event(self) -> Past:
        return dict(self.past)

    def wait_event(self, event: Past) -> None:
        for name, count in event.items():
            self.past[name] = max(self.past.get(name, 0), count)

    def wait_stream(self, other: CountingStream) -> None:
        self.wait_event(other.past)


def is_before(earlier: Past, later: Past) -> bool:
    return all(later.get(name, 0) >= count for name, count in earlier.items())


class Device:
    """A device module with one stream that computes and those that are made."""

    def __init__(self) -> None:
        self.compute = self.current = CountingStream("compute")
        self.made: list[CountingStream] = []

    def Stream(self) -> CountingStream:
        self.made.append(CountingStream(f"copies {len(self.made)}"))
        return self.made[-1]

    def current_stream(self) -> CountingStream:
        return self.current

    @contextmanager
    def stream(self, stream: CountingStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before
