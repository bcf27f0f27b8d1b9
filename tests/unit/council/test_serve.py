"""The council on a socket, as sites speak to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.council.council import Council
from shardwise.council.history import CouncilRecord
from shardwise.council.serve import Served
from shardwise.council.site_client import Asker

ENTER = {"say": "enter", "step": 0, "position": 0, "fresh": True, "about": {}, "end": 8}
ENTER |= {"digest": "0", "ranks": []}


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[str]:
    """The address of a council of two sites."""
    listener = socket.create_server(("127.0.0.1", 0))
    record, is_over = CouncilRecord(tmp_path / "sites.jsonl"), threading.Event()
    served = Served(Council(2, 60.0), listener, record, lambda event: None)

    def serve() -> None:
        while not is_over.is_set():
            served.step()

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    is_over.set()
    thread.join()
    record.close()
    listener.close()


@pytest.fixture
def join(meet: str) -> Iterator[Callable[[int], Asker]]:
    made: list[Asker] = []

    def asker(site: int) -> Asker:
        made.append(Asker(meet, site, 60.0))
        made[-1].ask(ENTER)
        return made[-1]

    yield asker
    for each in made:
        each.close()


def heard(asker: Asker) -> dict[str, Any]:
    answer = None
    while answer is None:
        answer = asker.answer(5.0)
    return answer


def test_two_sites_are_admitted(join: Callable[[int], Asker]) -> None:
    assert [heard(each)["say"] for each in (join(0), join(1))] == ["admitted", "admitted"]


def test_a_site_that_the_council_does_not_count_hears_so(join: Callable[[int], Asker]) -> None:
    answer = heard(join(2))
    assert (answer["say"], answer["num_sites"]) == ("stranger", 2)


def test_the_older_of_two_jobs_with_one_number_hears_so(join: Callable[[int], Asker]) -> None:
    older, newer = join(0), join(0)
    assert heard(older)["say"] == "replaced"
    join(1)
    assert heard(newer)["say"] == "admitted"


def test_a_site_knows_why_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    asker = Asker(f"127.0.0.1:{port}", 0, 60.0)
    asker.ask(ENTER)
    assert asker.answer(0.1) is None and asker.fault == "Connection refused"
