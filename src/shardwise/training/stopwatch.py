"""How long a device was at something, in many pieces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Takes pieces of time. On a GPU they lie between events of the current stream, so that the
    host waits for the device only when they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._pieces: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the watch runs."""
        started = self._now()
        try:
            yield
        finally:
            self._pieces.append((started, self._now()))

    def take_s(self) -> list[float]:
        """The seconds of each piece since the last call."""
        pieces, self._pieces = self._pieces, []
        if not self._on_gpu:
            return [ended - started for started, ended in pieces]
        if pieces:
            pieces[-1][1].synchronize()
        return [started.elapsed_time(ended) / 1000 for started, ended in pieces]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
