"""How each contender is started, and how its answer is read."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from peers.shapes import Setting, Shape

BENCHMARKS = Path(__file__).parents[1]
# `shardwise train` reports windows of this many steps; the first two hold compilation and warm-up.
_WINDOW, _WARM_WINDOWS = 5, 2


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run found."""

    step_s: float
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """A process to start, and how to read what it printed."""

    command: list[str]
    read: Callable[[str], Measured]


class Contender(Protocol):
    """One who trains."""

    def why_not(self, setting: Setting) -> str | None:
        """What is missing here for this setting, if anything is."""

    def job(self, name: str, shape: Shape, setting: Setting, steps: int) -> Job:
        """The run; `name` is the shape's."""


@dataclass(frozen=True, slots=True)
class Ours:
    """shardwise by its own command line: `tunnel` over free links, or `train` on one GPU."""

    device: str
    gpu: str
    """What the emulated cluster is made of."""

    runs_dir: Path
    overrides: tuple[str, ...] = ()

    def why_not(self, setting: Setting) -> str | None:
        """Nothing: what a setting needs is said by the command itself."""
        return None

    def job(self, name: str, shape: Shape, setting: Setting, steps: int) -> Job:
        """The command that a user would give."""
        given = [*self._of_shape(shape), *_of_setting(shape, setting), *self.overrides]
        shardwise = [sys.executable, "-m", "shardwise"]
        if shape.world > 1:
            file = str(BENCHMARKS / "llama-8b.yaml")
            options = ["--cluster", f"{shape.world}x{self.gpu}", "--device", self.device]
            options += ["--link-speed", "inf", "--steps", str(steps), "--json"]
            return Job([*shardwise, "tunnel", file, *options, *given], _read_tunnel)
        file = str(BENCHMARKS / "llama-8b-16-layers.yaml")
        run = f"gpu-{time.time_ns()}"
        total = _WINDOW * (_WARM_WINDOWS + math.ceil(steps / _WINDOW))
        given += [f"name={run}", f"runs_dir={self.runs_dir}", f"train.steps={total}"]
        given += [f"observe.log_every={_WINDOW}"]
        events = self.runs_dir / run / "events.jsonl"
        return Job([*shardwise, "train", file, *given], lambda _: _read_events(events))

    def _of_shape(self, shape: Shape) -> list[str]:
        changed = [f"model.overrides.{name}={_text(v)}" for name, v in shape.overrides.items()]
        given = [f"model.name={shape.model}", f"data.seq_len={shape.seq_len}", *changed]
        if self.device == "cpu":
            given += ["memory.compile=false", "precision.param=fp32"]
        return given


@dataclass(frozen=True, slots=True)
class Peer:
    """Another trainer, in a process of `peers` that prints its answer as its last line."""

    module: str
    device: str
    needs: tuple[str, ...]
    needs_for: dict[str, str]
    """Packages by the word of a setting that asks for them."""

    def why_not(self, setting: Setting) -> str | None:
        """What it cannot do, or the first package that is not there."""
        if setting.in_host:
            return "activations in host memory are ours alone"
        wanted = (*self.needs, *(self.needs_for[w] for w in setting.words if w in self.needs_for))
        missing = next((package for package in wanted if find_spec(package) is None), None)
        return f"{missing} is not installed" if missing else None

    def job(self, name: str, shape: Shape, setting: Setting, steps: int) -> Job:
        """Its module, told the shape by name."""
        options = ["--shape", name, "--setting", str(setting), "--steps", str(steps)]
        command = [sys.executable, "-m", self.module, *options, "--device", self.device]
        return Job(command, _read_last_line)


def contenders_on(
    device: str, gpu: str, runs_dir: Path, overrides: tuple[str, ...]
) -> dict[str, Contender]:
    """All of them, by name."""
    return {
        "ours": Ours(device, gpu, runs_dir, overrides),
        "torchtitan": Peer("peers.torchtitan", device, ("torchtitan",), {"float8": "torchao"}),
        "trainer": Peer("peers.trainer", device, ("accelerate",), {"liger": "liger_kernel"}),
    }


def _of_setting(shape: Shape, setting: Setting) -> list[str]:
    given = [
        f"train.micro_batch={setting.micro_batch}",
        f"memory.checkpoint_activations={setting.recompute}",
    ]
    if shape.world > 1:
        strategy = "shard_grad_op" if "keep" in setting.words else "full_shard"
        given.append(f"shard.strategy={strategy}")
    if "float8" in setting.words:
        given.append("precision.linear=float8")
    if setting.in_host:
        given.append(f"memory.offload_activations={setting.in_host}")
    return given


def _read_tunnel(output: str) -> Measured:
    found = json.loads(output)
    return Measured(
        found["free_step_s"], found["peak_allocated_bytes"], found["peak_reserved_bytes"]
    )


def _read_events(path: Path) -> Measured:
    events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    steps = [event for event in events if event["event"] == "step"]
    memory = steps[-1]["memory"]
    step_s = statistics.median(event["step_s"] for event in steps[_WARM_WINDOWS:])
    return Measured(step_s, memory["allocated"], memory["reserved"])


def _read_last_line(output: str) -> Measured:
    return Measured(**json.loads(output.splitlines()[-1]))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
