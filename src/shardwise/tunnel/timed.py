"""Rank 0 on a real device: steps over modelled links, and the same steps over free ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from shardwise.data.loader import MicroBatch
from shardwise.errors import ExitCode, UserError
from shardwise.facts.gpus import match_gpu
from shardwise.metrics.meters import efficiency, peak_memory
from shardwise.plan.planned import Plan
from shardwise.training.profiled_steps import StepProfiler
from shardwise.training.surroundings import fast_attention, prepare_matmuls, steady_collector
from shardwise.tunnel.emulate import Emulator
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.inside_blocks import carried_by
from shardwise.tunnel.ledger import held_bytes
from shardwise.tunnel.link_clock import CudaClock, HostClock, LinkClock
from shardwise.tunnel.rank_zero import Rank, fill_rank, plan_on, shard_rank
from shardwise.tunnel.result import Memory, Timing, TunnelResult
from shardwise.tunnel.world import rank_zero_of

Device = Literal["cuda", "cpu"]

# Steps before the first pass: compilation, the allocator's first blocks, Adam's state.
WARM_UP_STEPS = 3
# Steps before the pass over modelled links: the clock learns how long its waits really take.
SETTLING_STEPS = 2
TRACED_STEPS = 2


def run_timed(
    plan: Plan, links: Links, device: Device, num_steps: int, trace: Path | None = None
) -> TunnelResult:
    """Measure `num_steps` steps twice in this process: over free links, then over modelled ones.

    For links of infinite speed the second pass is left out. Additional steps, which are not
    measured, are written to `trace`.
    """
    here = plan_on(plan, device, compiled=device == "cuda")
    prepare_matmuls(here)
    clock: LinkClock = CudaClock() if device == "cuda" else HostClock()
    emulator = Emulator(links, clock, free=True)
    notes: list[str] = []
    with rank_zero_of(plan.world_size):
        shell = shard_rank(here, emulator)
        with carried_by(emulator, shell.mesh.groups):
            rank = fill_rank(shell, notes.append, has_values=True)
            stand = _Stand(rank, emulator)
            with steady_collector(), fast_attention(rank.session.device):
                linked, free = _both_passes(stand, num_steps)
                memory = stand.memory()
                if trace is not None:
                    stand.trace(here, trace)
    return TunnelResult(
        plan=plan,
        mode="gpu" if device == "cuda" else "cpu",
        device_name=_device_name(device),
        links=links,
        memory=memory,
        timing=_timing(here, free, linked, num_steps),
        collectives=emulator.traffic.items,
        notes=[*notes, *_notes(plan, device)],
        trace=trace,
    )


def time_steps(
    clock: LinkClock, device: torch.device, steps: Sequence[Callable[[], None]]
) -> list[float]:
    """The seconds of each step, one right after the other. The peak of memory is theirs."""
    clock.finish()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    marks = [clock.mark()]
    for step in steps:
        step()
        marks.append(clock.mark())
    clock.finish()
    return [clock.seconds(start, end) for start, end in pairwise(marks)]


@dataclass(frozen=True, slots=True)
class _Pass:
    """Several steps in a row."""

    step_s: float
    """The median."""

    emulated_s: float
    """What the links took in a step, on average."""


class _Stand:
    """Holds rank 0 while it makes its steps."""

    def __init__(self, rank: Rank, emulator: Emulator) -> None:
        self.rank = rank
        self.emulator = emulator
        self.device = rank.session.device
        self.position = 0
        self.grad_bytes = 0
        self._weighing = rank.session.optimizer.register_step_pre_hook(self._weigh_grads)

    def run(self, num_steps: int) -> _Pass:
        """Run steps one right after the other, as in training. The memory peak is theirs."""
        clock = self.emulator.clock
        # Training has a thread for it.
        prepared = [self._batches() for _ in range(num_steps)]
        times = time_steps(clock, self.device, [partial(self._step, each) for each in prepared])
        return _Pass(statistics.median(times), clock.settle().took_s / num_steps)

    def trace(self, plan: Plan, path: Path) -> None:
        """Some steps under the profiler, after one that warms it up."""
        observe = replace(plan.settings.observe, profile=2, profile_steps=TRACED_STEPS)
        session = self.rank.session
        profiler = StepProfiler(
            plan, session.model, session.units, session.mesh.world, observe=observe
        )
        try:
            prepared = [self._batches() for _ in range(1 + TRACED_STEPS)]
            for number, batches in enumerate(prepared, start=1):
                with profiler.step(number):
                    self._step(batches)
            self.emulator.clock.finish()
            profiler.export(path)
        finally:
            profiler.close()

    def memory(self) -> Memory:
        """The peak of the last pass, and the classes that can be told apart in it."""
        peak, kind = peak_memory(self.device), self.device.type
        always = {
            "params": held_bytes(self.rank.params, kind),
            "optimizer": held_bytes(self.rank.optimizer_state, kind),
        }
        return Memory(
            allocated_bytes=peak.allocated,
            reserved_bytes=peak.reserved,
            classes={**always, "all else": max(0, peak.allocated - sum(always.values()))},
            largest={**always, "grads": self.grad_bytes},
        )

    def _batches(self) -> list[MicroBatch]:
        """The batches of the next step."""
        batches = self.rank.loader.step_batches(self.position)
        self.position += 1
        return [batch.pinned() for batch in batches] if self.device.type == "cuda" else batches

    def _step(self, batches: list[MicroBatch]) -> None:
        self.emulator.traffic.forget()
        # At a rate of 0 Adam does the same work, and the weights stay as they are.
        result = self.rank.stepper.run(batches, 0.0)
        if not result.applied:
            raise _not_finite(result.grad_norm)

    def _weigh_grads(self, *_: Any) -> None:
        """Once, in the first step: later ones are timed."""
        self.grad_bytes = held_bytes(self.rank.grads, self.device.type)
        self._weighing.remove()


def _both_passes(stand: _Stand, num_steps: int) -> tuple[_Pass, _Pass]:
    """Steps over modelled links, and over free ones before them."""
    emulator = stand.emulator
    stand.run(WARM_UP_STEPS)
    free = stand.run(num_steps)
    if emulator.links.are_free:
        return free, free
    emulator.free = False
    for _ in range(SETTLING_STEPS):
        stand.run(1)
    return stand.run(num_steps), free


def _not_finite(grad_norm: float) -> UserError:
    return UserError(
        f"a step gave a gradient norm of {grad_norm}, so no update was made",
        why="all other shards are copies of this one, and this model cannot compute with that",
        fix="write --device fake: then nothing is computed",
        code=ExitCode.DIVERGED,
    )


def _timing(here: Plan, free: _Pass, linked: _Pass, num_steps: int) -> Timing:
    tokens_per_s = here.tokens_per_step / here.world_size / linked.step_s
    # Shares of what this device can do, whichever one the plan is for.
    gpu = match_gpu(_device_name("cuda")) if here.cluster.device == "cuda" else None
    measured = efficiency(replace(here, cluster=replace(here.cluster, gpu=gpu)), tokens_per_s)
    return Timing(
        num_steps=num_steps,
        step_s=linked.step_s,
        free_step_s=free.step_s,
        emulated_s=linked.emulated_s,
        tokens_per_s_per_gpu=tokens_per_s,
        mfu=measured.mfu if measured else None,
        hfu=measured.hfu if measured else None,
    )


def _device_name(device: Device) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "this machine's CPU"


def _notes(plan: Plan, device: Device) -> list[str]:
    notes = []
    if device == "cpu":
        notes.append("on a CPU nothing overlaps: all communication is exposed")
        if plan.decided.compile:
            notes.append("torch.compile is off on a CPU")
        return notes
    name = _device_name("cuda")
    notes.append("collectives of single numbers (tokens, norm, loss) take no time here")
    if match_gpu(name) != plan.cluster.gpu:
        planned = plan.cluster.device_name
        notes.append(f"compute and memory are those of {name}, links those of {planned}")
    return notes
