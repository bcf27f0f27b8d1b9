from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_conversations import prepared, write_rows

from shardwise.data import examples, workers
from shardwise.data.workers import make_in_order
from shardwise.errors import UserError


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_tokens_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the cache, skipped rows and their order, with rows that are made here and rows that
    are not."""
    monkeypatch.setattr(examples, "make_in_order", partial(make_in_order, alone=7))
    config = write_rows(tmp_path / "a.jsonl", 200, '{"messages": []}', "no JSON")
    caches = [tmp_path / f"cache-{number}" for number in (1, 2)]
    stored = [
        prepared(replace(config, workers=number), cache)
        for number, cache in enumerate(caches, start=1)
    ]
    assert stored[0].skipped == stored[1].skipped and len(stored[0].skipped) == 2
    assert contents(caches[0]) == contents(caches[1])


def test_results_are_in_order_whatever_is_ready_first() -> None:
    rows = [0.2, *(0.0 for _ in range(300)), 0.1, 0.0]
    numbered = [f"{number}:{pause}" for number, pause in enumerate(rows)]
    assert list(make_in_order(numbered, str.upper, 3, alone=0)) == numbered


def test_a_process_that_dies_ends_the_run() -> None:
    with pytest.raises(UserError, match="a process that renders conversations has died") as caught:
        list(make_in_order([3] * 200, os._exit, 2, alone=0))
    assert caught.value.fix == "write data.workers=1"


def test_processes_end_with_whoever_stops_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[Any]] = []
    popen = subprocess.Popen

    def start(*args: Any, **how: Any) -> subprocess.Popen[Any]:
        started.append(popen(*args, **how))
        return started[-1]

    monkeypatch.setattr(workers.subprocess, "Popen", start)
    made = make_in_order(["a"] * 1000, str.upper, 2, alone=1)
    assert [next(made), next(made)] == ["A", "A"] and len(started) == 2
    made.close()
    assert all(process.poll() is not None for process in started)
