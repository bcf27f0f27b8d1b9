"""What is reduced takes memory that activations have left: whose memory it is, and who waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardwise.parallel.comm import _Shared


class Streams:
    """Stands in for torch.cuda: which stream is the current one."""

    def __init__(self) -> None:
        self.current = "computes"

    def current_stream(self, device: Any) -> str:
        return self.current

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before


class Memory:
    """A tensor that knows whose memory it is, and who else uses it."""

    def __init__(self, owner: str) -> None:
        self.owner, self.users = owner, list[str]()

    def record_stream(self, stream: str) -> None:
        self.users.append(stream)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    return made


def test_what_a_reduction_gives_is_memory_of_the_stream_that_computes(streams: Streams) -> None:
    shared = _Shared(lambda size, **_: Memory(streams.current))  # type: ignore[arg-type, return-value]
    asked: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cuda")}
    for _ in range(2):  # every step asks anew
        taken: Any = shared((8,), **asked)
        with streams.stream("reduces"):
            given: Any = shared((1,), **asked)
        assert (taken.owner, taken.users) == ("computes", [])
        assert (given.owner, given.users) == ("computes", ["reduces"])


def test_a_cpu_has_no_streams() -> None:
    shared = _Shared(torch.empty)
    made = shared((3,), dtype=torch.float32, device=torch.device("cpu"))
    assert made.shape == (3,) and made.dtype == torch.float32
