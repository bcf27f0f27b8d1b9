"""What is reduced takes memory that activations have left: whose memory it is, and who waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.parallel.comm import ComputeMemory, reduce_alone


class Stream:
    """Stands in for a stream of a GPU: for whom it waits."""

    def __init__(self, name: str) -> None:
        self.name, self.waits = name, list[str]()

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)


class Streams:
    """Stands in for torch.cuda: which stream is the current one."""

    def __init__(self) -> None:
        self.computes, self.reduces = Stream("computes"), Stream("reduces")
        self.current = self.computes

    @contextmanager
    def stream(self, one: Stream) -> Iterator[None]:
        before, self.current = self.current, one
        yield
        self.current = before


class Memory:
    """A tensor that knows whose memory it is, and who else uses it."""

    def __init__(self, owner: Stream) -> None:
        self.owner, self.users = owner.name, list[str]()

    def record_stream(self, stream: Stream) -> None:
        self.users.append(stream.name)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: made.computes)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    return made


ASKED: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cuda")}


def test_what_a_reduction_gives_is_memory_of_the_stream_that_computes(streams: Streams) -> None:
    shared = ComputeMemory(lambda size, **_: Memory(streams.current))  # type: ignore[arg-type, return-value]
    for _ in range(2):  # every step asks anew
        taken: Any = shared((8,), **ASKED)
        with streams.stream(streams.reduces):
            given: Any = shared((1,), **ASKED)
        assert (taken.owner, taken.users) == ("computes", [])
        assert (given.owner, given.users) == ("computes", ["reduces"])
    assert (streams.computes.waits, streams.reduces.waits) == ([], ["computes"] * 2)


def test_a_backward_that_broke_off_changes_nothing(streams: Streams) -> None:
    """It had asked for what goes into a reduction, and never for what comes out of it."""
    shared = ComputeMemory(lambda size, **_: Memory(streams.current))  # type: ignore[arg-type, return-value]
    shared((8,), **ASKED)
    taken: Any = shared((8,), **ASKED)
    with streams.stream(streams.reduces):
        given: Any = shared((1,), **ASKED)
    assert (taken.owner, taken.users) == ("computes", [])
    assert (given.owner, given.users) == ("computes", ["reduces"])


def test_a_cpu_has_no_streams() -> None:
    shared = ComputeMemory(torch.empty)
    made = shared((3,), dtype=torch.float32, device=torch.device("cpu"))
    assert made.shape == (3,) and made.dtype == torch.float32


@pytest.mark.parametrize("offload", [False, True])
def test_what_the_host_still_copies_is_not_the_memory_of_an_input(offload: bool) -> None:
    """FSDP2 frees the input of a reduction before the output has left for the host."""
    given: list[Any] = []
    module: Any = SimpleNamespace(set_custom_reduce_scatter=given.append)
    plan: Any = SimpleNamespace(
        decided=SimpleNamespace(offload=offload), cluster=SimpleNamespace(device="cpu")
    )
    reduce_alone(module, plan)
    assert len(given) == (0 if offload else 1)
