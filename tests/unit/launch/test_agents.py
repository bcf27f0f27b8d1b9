"""Agents of several nodes, as threads with one store: one count, one cause, and who is gone."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch.distributed as dist

from shardwise.errors import ExitCode, UserError
from shardwise.launch import agents
from shardwise.launch.agents import Agents
from shardwise.launch.failure import Passing
from shardwise.launch.group import START_VARIABLE

Found = TypeVar("Found")
CLOSED = Passing("rank 0 failed: Connection closed by peer", code=ExitCode.WORKER_DIED)
KILLED = Passing("rank 1 failed: killed by signal SIGKILL", code=ExitCode.WORKER_DIED)
WRONG = UserError("rank 1 failed: IndexError", why="it has no such row", code=ExitCode.WORKER_DIED)


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_TOGETHER_S", 0.5)
    monkeypatch.setattr(agents, "_ALIVE_WITHIN_S", 0.5)
    monkeypatch.setattr(agents, "_BEAT_S", 0.0)
    monkeypatch.setenv(START_VARIABLE, "")


def met(count: int) -> list[Agents]:
    store = dist.HashStore()
    return [Agents(store, number, count) for number in range(count)]


def together(*acts: Callable[[], Found]) -> list[Found]:
    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(lambda act: act(), acts))


def test_all_count_the_failures_of_the_one_that_has_counted_most() -> None:
    one, two = met(2)
    assert together(lambda: one.begin(1), lambda: two.begin(3)) == [3, 3]


def test_the_first_cause_is_told_on_all_nodes() -> None:
    one, two = met(2)
    together(lambda: one.begin(0), lambda: two.begin(0))
    found = together(lambda: one.first_error(CLOSED), lambda: two.first_error(WRONG))
    assert [str(error) for error in found] == [str(WRONG)] * 2
    assert not any(isinstance(error, Passing) for error in found)
    assert (one.gone, two.gone) == ([], [])


def test_what_may_pass_stays_so_and_the_first_to_tell_wins() -> None:
    (one, two), first = met(2), []
    together(lambda: one.begin(0), lambda: two.begin(0))

    def tell_later() -> UserError:
        while not one._failed():
            pass
        return two.first_error(CLOSED)

    first = together(lambda: one.first_error(KILLED), tell_later)
    assert [error.what for error in first] == [KILLED.what] * 2
    assert all(isinstance(error, Passing) for error in first)


def test_an_agent_that_does_not_answer_is_named() -> None:
    one, two = met(2)
    together(lambda: one.begin(0), lambda: two.begin(0))
    assert one.first_error(CLOSED).what == CLOSED.what
    assert one.gone == [socket.gethostname()]


def test_an_agent_whose_ranks_still_run_is_there() -> None:
    one, two = met(2)
    together(lambda: one.begin(0), lambda: two.begin(0))
    is_over = False

    def look() -> UserError:
        while not is_over:
            two.beat()
        return CLOSED

    def fail() -> UserError:
        nonlocal is_over
        error = one.first_error(KILLED)
        is_over = True
        return error

    assert together(fail, look)[0].what == KILLED.what
    assert one.gone == []


def test_one_node_asks_nobody() -> None:
    (only,) = met(1)
    assert only.begin(2) == 2
    assert only.first_error(WRONG) is WRONG


class Gone:
    """The store of a node that is not there any more."""

    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("Connection reset by peer")


def test_without_the_store_each_reports_its_own() -> None:
    alone = met(2)[0]
    alone._store = Gone()  # type: ignore[assignment]
    assert alone.first_error(CLOSED) is CLOSED
    assert alone.gone == ["the node where the agents meet"]
    alone.beat()
