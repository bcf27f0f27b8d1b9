"""Steps that are made again after a restart or a rollback replace the old ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from shardwise.metrics.sinks.tensorboard import TensorBoardSink


def step(number: int, loss: float) -> dict[str, Any]:
    return {"event": "step", "time": 1.0 + number, "step": number, "loss": loss}


def losses(folder: Path) -> dict[int, float]:
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    found.Reload()
    points = found.Tensors("step/loss")
    assert len({point.step for point in points}) == len(points)
    return {point.step: make_ndarray(point.tensor_proto).item() for point in points}


def test_a_number_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.see(step(1, 1 / 3))
    sink.close()
    assert losses(tmp_path) == {1: 1 / 3}


def test_a_resumed_run_replaces_what_it_does_again(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    first.see({"event": "start", "time": 1.0, "step": 0})
    for number in range(1, 9):
        first.see(step(number, 1.0))
    first.close()
    second = TensorBoardSink(tmp_path)
    second.see({"event": "start", "time": 20.0, "step": 4})
    for number in range(5, 11):
        second.see(step(number, 2.0))
    second.close()
    assert losses(tmp_path) == {n: 1.0 if n <= 4 else 2.0 for n in range(1, 11)}


def test_a_rollback_does_so_too(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.see({"event": "start", "time": 1.0, "step": 0})
    for number in range(1, 7):
        sink.see(step(number, 1.0))
    sink.see({"event": "rollback", "time": 20.0, "step": 3, "position": 9})
    sink.see(step(4, 2.0))
    sink.close()
    assert losses(tmp_path) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}
