"""Time on the host, and on a GPU that is only played."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shardwise.tunnel.link_clock import CudaClock, HostClock, StoppedClock


class PlayedTime:
    """The module `time`, where only sleep takes any."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_the_host_sleeps_for_what_work_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    time = PlayedTime()
    monkeypatch.setattr("shardwise.tunnel.link_clock.time", time)
    clock = HostClock()
    clock.carry("wire", "gather", 0.05, lambda: time.sleep(0.03))
    clock.carry("wire", "gather", 0.0, lambda: time.sleep(0.01))
    spent = clock.settle()
    assert spent.asked_s == pytest.approx(0.05)
    assert spent.took_s == pytest.approx(0.06)
    assert clock.settle().took_s == 0.0


def test_fake_tensors_take_no_time() -> None:
    done: list[int] = []
    clock = StoppedClock()
    clock.carry("wire", "gather", 3600.0, lambda: done.append(1))
    assert done == [1]
    assert clock.settle().took_s == 0.0


def test_the_wait_of_a_stream_is_there() -> None:
    assert callable(torch.cuda._sleep), "torch has another way now? see clock._spin"


@dataclass
class PlayedGpu:
    """A device whose time passes only by what it is told to do."""

    cycles_per_s: float
    now_s: float = 0.0
    waited_for: int = 0

    def sleep(self, cycles: int) -> None:
        self.now_s += cycles / self.cycles_per_s

    def work(self) -> None:
        self.now_s += 0.002


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
    played = PlayedGpu(cycles_per_s=2e9)

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at_s = 0.0

        def record(self, stream: object = None) -> None:
            self.at_s = played.now_s

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at_s - self.at_s)

    class Stream:
        def wait_event(self, event: Event) -> None:
            played.waited_for += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", played.sleep)
    return played


def test_copies_are_learnt_and_taken_off_the_wait(gpu: PlayedGpu) -> None:
    clock = CudaClock()
    clock.carry("shard", "gather", 0.0, gpu.work)
    assert clock.settle().took_s == pytest.approx(0.002)
    clock.carry("shard", "gather", 0.010, gpu.work)
    spent = clock.settle()
    assert (spent.asked_s, spent.took_s) == (0.010, pytest.approx(0.010, rel=1e-3))


def test_a_copy_that_outlasts_the_link_is_not_shortened(gpu: PlayedGpu) -> None:
    clock = CudaClock()
    clock.carry("shard", "gather", 0.0, gpu.work)
    clock.settle()
    clock.carry("shard", "gather", 0.001, gpu.work)
    assert clock.settle().took_s == pytest.approx(0.002)


def test_a_clock_that_falls_under_load_is_followed(gpu: PlayedGpu) -> None:
    clock = CudaClock()
    gpu.cycles_per_s = 1.5e9
    took = []
    for _ in range(3):
        clock.carry("shard", "gather", 0.010, lambda: None)
        took.append(clock.settle().took_s)
    assert took[0] == pytest.approx(0.0133, rel=0.01)
    assert took[-1] == pytest.approx(0.010, rel=1e-3)


def test_one_wire_carries_one_collective_at_a_time(gpu: PlayedGpu) -> None:
    clock = CudaClock()
    for wire in ("shard", "replicate", "shard", "shard"):
        clock.carry(wire, "any", 0.001, gpu.work)
    assert gpu.waited_for == 2
