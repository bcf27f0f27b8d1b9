"""Calls in processes of their own, forked from one that has imported torch and touched no GPU.

A call that fails, hangs or runs out of memory is an answer that says so, and disturbs no other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from peers.process import what_failed
from shardwise.errors import UserError

_POLL_S = 0.2
# How long a process may take to end after its answer.
_LEAVE_S = 10.0


@dataclass(frozen=True, slots=True)
class Call:
    """Something to do, and the file for all that it prints."""

    work: Callable[[], Any]
    log: Path
    needs: float = 0.0
    """Its part of the room that all that run at once share."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned, or why it did not."""

    value: Any
    problem: str
    took_s: float


@dataclass(slots=True)
class _Running:
    """A call that has been started."""

    index: int
    call: Call
    process: ForkProcess
    answers: Connection
    started: float


def run_calls(
    calls: Sequence[Call],
    *,
    at_once: int = 1,
    room: float = inf,
    limit_s: float = inf,
    ends: float = inf,
) -> Iterator[tuple[int, Answer]]:
    """The calls' answers as they come, each with the call's place.

    Only as many run at once as fit into the room. None may take longer than `limit_s`, and none
    starts or goes on after `ends`.
    """
    waiting = list(enumerate(calls))
    running: list[_Running] = []
    while waiting or running:
        while waiting and _fits(waiting[0][1], running, at_once, room) and time.monotonic() < ends:
            running.append(_start(*waiting.pop(0)))
        if time.monotonic() >= ends:
            yield from (
                (index, Answer(None, "not run: the time was up", 0.0)) for index, _ in waiting
            )
            waiting = []
        wait([each.answers for each in running], timeout=_POLL_S)
        for each in list(running):
            until = min(each.started + limit_s, ends)
            if each.answers.poll() or time.monotonic() > until:
                running.remove(each)
                yield each.index, _finish(each)


def _fits(call: Call, running: Sequence[_Running], at_once: int, room: float) -> bool:
    used = sum(each.call.needs for each in running)
    return not running or (len(running) < at_once and used + call.needs <= room)


def _start(index: int, call: Call) -> _Running:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(call, theirs))
    process.start()
    theirs.close()
    return _Running(index, call, process, ours, time.monotonic())


def _answer(call: Call, answers: Connection) -> None:
    # Whoever it starts is ended with it.
    os.setsid()
    log = call.log.open("w", encoding="utf-8", buffering=1)
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = sys.stderr = log
    try:
        answers.send((call.work(), ""))
    except UserError as error:
        traceback.print_exc()
        answers.send((None, f"{error.what}: {error.why}" if error.why else error.what))
    log.flush()
    # Without a word to libraries, whose goodbyes take seconds.
    os._exit(0)


def _finish(running: _Running) -> Answer:
    value, problem = None, ""
    if not running.answers.poll():
        problem = "the time was up"
    else:
        with suppress(EOFError):
            value, problem = running.answers.recv()
            running.process.join(_LEAVE_S)
    took_s = time.monotonic() - running.started
    with suppress(ProcessLookupError):
        os.killpg(running.process.pid or 0, signal.SIGKILL)
    running.process.join()
    if value is None and not problem:
        text = running.call.log.read_text(encoding="utf-8", errors="replace")
        problem = what_failed(text, running.process.exitcode or 0)
    return Answer(value, problem, took_s)
