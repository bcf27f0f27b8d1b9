"""What a peer's process is told on its command line, and what it answers in its last line."""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass

from peers.shapes import SHAPES, Setting, Shape

# Compilation, the allocator's first blocks, and a GPU that is still cool.
WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True)
class Task:
    """One run."""

    shape: Shape
    setting: Setting
    steps: int
    """To measure, after those of the warm-up."""

    device: str


def read_task() -> Task:
    """From the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--setting", type=Setting.parse, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    return Task(SHAPES[given.shape], given.setting, given.steps, given.device)


def answer(times: list[float], device: str) -> None:
    """The median step and the peak of memory, as the last line of all that is printed."""
    import torch

    from shardwise.metrics.meters import peak_memory

    peak = peak_memory(torch.device(device))
    found = {"step_s": statistics.median(times), "allocated_bytes": peak.allocated}
    print(json.dumps(found | {"reserved_bytes": peak.reserved}), flush=True)
