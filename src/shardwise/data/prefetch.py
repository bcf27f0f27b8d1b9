"""Batches read ahead of their use, in one background thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from shardwise.data.loader import BatchLoader, MicroBatch


class Prefetcher:
    """Iterate over steps in order while a thread reads the next ones.

    An error in the thread is raised to the consumer, at the step that it belongs to.
    """

    def __init__(
        self,
        loader: BatchLoader,
        steps: range,
        *,
        depth: int,
        pin_memory: bool,
    ) -> None:
        self.wait_s = 0.0
        """Seconds that the consumer has waited for data so far."""
        self._loader = loader
        self._steps = iter(steps)
        self._pin_memory = pin_memory
        self._pending: deque[Future[list[MicroBatch]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        for _ in range(depth):
            self._ask_for_next()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        if not self._pending:
            raise StopIteration
        started = time.perf_counter()
        # The error is kept, so a step that failed fails again and is never skipped.
        batches = self._pending[0].result()
        self.wait_s += time.perf_counter() - started
        self._pending.popleft()
        self._ask_for_next()
        return batches

    def close(self) -> None:
        """Drop what was not consumed and stop the thread; a second call does nothing."""
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask_for_next(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._pending.append(self._thread.submit(self._read, step))

    def _read(self, step: int) -> list[MicroBatch]:
        batches = self._loader.step_batches(step)
        return [batch.pinned() for batch in batches] if self._pin_memory else batches


def prefetching(
    loader: BatchLoader,
    start_step: int,
    stop_step: int,
    *,
    depth: int = 2,
    pin_memory: bool = False,
) -> Prefetcher:
    """The micro-batches of steps `start_step` to `stop_step - 1`, with at most `depth` steps
    read ahead."""
    return Prefetcher(
        loader, range(start_step, stop_step), depth=max(1, depth), pin_memory=pin_memory
    )
