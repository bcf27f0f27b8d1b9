from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from shardwise.data.loader import BatchLoader
from shardwise.data.prefetch import prefetching


def loader_over(sequences: Any) -> BatchLoader:
    return BatchLoader(
        sequences,
        seed=0,
        shuffle=False,
        global_batch=2,
        micro_batch=1,
        accumulation=2,
        rank=0,
        num_ranks=1,
    )


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("depth", [1, 2, 20])
def test_steps_come_in_order_and_only_those_asked_for(counting_sequences: Any, depth: int) -> None:
    loader = loader_over(counting_sequences(1000))
    with prefetching(loader, 3, 10, depth=depth) as steps:
        read = [[int(batch.inputs[0, 0]) for batch in batches] for batches in steps]
    assert read == [[2 * step, 2 * step + 1] for step in range(3, 10)]
    assert prefetch_threads() == []


def test_no_step_is_an_empty_iteration(counting_sequences: Any) -> None:
    with prefetching(loader_over(counting_sequences(4)), 5, 5) as steps:
        assert list(steps) == []


def test_an_error_in_the_thread_reaches_the_consumer_at_its_step(counting_sequences: Any) -> None:
    class Broken(counting_sequences):  # type: ignore[misc]
        def get(self, index: int) -> Any:
            if index == 4:
                raise OSError("disk is gone")
            return super().get(index)

    with prefetching(loader_over(Broken(100)), 0, 10) as steps:
        assert len(next(steps)) == 2
        assert len(next(steps)) == 2
        for _ in range(2):
            with pytest.raises(OSError, match="disk is gone"):
                next(steps)
    assert prefetch_threads() == []


def test_closing_early_stops_the_thread_and_reads_no_further(counting_sequences: Any) -> None:
    read: list[int] = []

    class Recording(counting_sequences):  # type: ignore[misc]
        def get(self, index: int) -> Any:
            read.append(index)
            return super().get(index)

    steps = prefetching(loader_over(Recording(1000)), 0, 500, depth=3)
    next(steps)
    steps.close()
    steps.close()
    assert list(steps) == []
    assert prefetch_threads() == []
    assert max(read) < 2 * (1 + 3)


def test_the_wait_for_slow_data_is_measured(counting_sequences: Any) -> None:
    class Slow(counting_sequences):  # type: ignore[misc]
        def get(self, index: int) -> Any:
            time.sleep(0.02)
            return super().get(index)

    with prefetching(loader_over(Slow(100)), 0, 3) as steps:
        list(steps)
        assert steps.wait_s >= 0.1

    with prefetching(loader_over(counting_sequences(100)), 0, 3, depth=3) as steps:
        time.sleep(0.2)
        list(steps)
        assert steps.wait_s < 0.1


def test_reading_overlaps_with_use(counting_sequences: Any) -> None:
    reader: set[str] = set()

    class Recording(counting_sequences):  # type: ignore[misc]
        def get(self, index: int) -> Any:
            reader.add(threading.current_thread().name)
            return super().get(index)

    with prefetching(loader_over(Recording(100)), 0, 5) as steps:
        list(steps)
    assert len(reader) == 1
    assert threading.current_thread().name not in reader


def test_memory_is_pinned_on_request_only(
    counting_sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    loader = loader_over(counting_sequences(10))
    with prefetching(loader, 0, 2) as steps:
        list(steps)
    assert pinned == []
    with prefetching(loader, 0, 2, pin_memory=True) as steps:
        list(steps)
    assert len(pinned) == 2 * 2 * 2
