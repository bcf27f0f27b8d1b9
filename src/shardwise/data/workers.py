"""Rows made into examples by several processes, in the order of the rows.

Rendering a template is Python, which one process does on one core. Each process gets some rows at a
time and gives back what it made of them, so neither the results nor their order depend on the
number of processes. A process ends when its input does, and so with whoever started it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from queue import SimpleQueue
from typing import Any, BinaryIO, cast

from shardwise.errors import ExitCode, UserError

Make = Callable[[Any], Any]
# A process must import its libraries first. That takes as long as some thousands of rows.
ALONE = 4096
_CHUNK = 64
_MOST = 16


def usable_cores() -> int:
    """The number of processes that pays, where nobody names one."""
    return min(_MOST, os.cpu_count() or 1)


def make_in_order(
    rows: Iterable[Any], make: Make, num_workers: int, *, alone: int = ALONE
) -> Iterator[Any]:
    """`make` of each row, in order. The first rows are made here, and further ones by
    `num_workers` processes. `make` and its results must be fit for pickle."""
    left = iter(rows)
    yield from map(make, islice(left, alone))
    if num_workers == 1:
        yield from map(make, left)
        return
    chunks = iter(lambda: list(islice(left, _CHUNK)), [])
    first = next(chunks, None)
    if first is None:
        return
    with ExitStack() as stack:
        idle: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(num_workers):
            idle.put(stack.enter_context(Worker(make)))
        threads = ThreadPoolExecutor(num_workers, thread_name_prefix="rows")
        stack.callback(threads.shutdown, cancel_futures=True)
        asked: deque[Future[list[Any]]] = deque([threads.submit(_ask, idle, first)])
        for chunk in chunks:
            asked.append(threads.submit(_ask, idle, chunk))
            # Enough for all to do, and no more than memory needs to hold.
            if len(asked) > 4 * num_workers:
                yield from asked.popleft().result()
        while asked:
            yield from asked.popleft().result()


class Worker:
    """One process that makes examples."""

    def __init__(self, make: Make) -> None:
        # Tokenizers must not start threads for all cores in each of the processes.
        alone = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.data.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **alone},
            start_new_session=True,
        )
        self._make = make
        self._has_make = False

    def ask(self, chunk: list[Any]) -> list[Any]:
        """What `make` makes of each row of a chunk."""
        questions, answers = cast(Any, self._process.stdin), cast(Any, self._process.stdout)
        try:
            if not self._has_make:
                _send(questions, self._make)
                self._has_make = True
            _send(questions, chunk)
            made: list[Any] = pickle.load(answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(
                "a process that renders conversations has died",
                why=f"it ended with code {self._process.poll()}; the system kills processes where "
                "memory runs out",
                fix="write data.workers=1",
                code=ExitCode.ENVIRONMENT,
            ) from error
        return made

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        # Whatever it makes now, nobody waits for it.
        self._process.kill()
        self._process.communicate()


def _ask(idle: SimpleQueue[Worker], chunk: list[Any]) -> list[Any]:
    worker = idle.get()
    try:
        return worker.ask(chunk)
    finally:
        idle.put(worker)


def _send(stream: BinaryIO, message: Any) -> None:
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def _serve() -> None:
    """Make what is asked for until there is no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a library prints must not get between the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        make: Make = pickle.load(sys.stdin.buffer)
        while True:
            chunk: list[Any] = pickle.load(sys.stdin.buffer)
            _send(answers, [make(row) for row in chunk])
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    _serve()
