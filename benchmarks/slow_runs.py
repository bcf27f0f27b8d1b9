"""Made-slow runs: is the cause that was put in the first one that the doctor names?

    python benchmarks/slow_runs.py

A made run has the plan of a real configuration and the events that such a run would leave, with
noise, one cause, and a smaller second one beside it. Nothing is trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from shardwise.config.load import load_config
from shardwise.doctor.run.case import Case
from shardwise.doctor.slow.ranked import rank_causes
from shardwise.facts.collective_cost import bus_rate
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan
from shardwise.report.collect import RunRecord

BEGAN = 1_790_000_000.0
STEPS = 600
EVERY = 10
COMPUTE = ("matmul", "attention", "elementwise", "loss", "recompute", "optimizer")
PLACES = (
    ("model=llama-3.1-8b", "cluster=8xH100"),
    ("model=llama-3.1-8b", "cluster=4x8xH100"),
    ("model=llama-3.1-70b", "cluster=4x8xH100"),
)


@cache
def plan_of(*settings: str) -> Plan:
    return choose_plan(load_config(None, ["data=synthetic", *settings]), {})


@dataclass
class Made:
    """A run in the making. Seconds are those of one step."""

    plan: Plan
    seed: int
    data_s: float = 0.0
    late_s: float = 0.0
    exposed_s: float = 0.0
    idle_s: float = 0.0
    copies_s: float = 0.0
    compute_factor: float = 1.0
    other_s: float = 0.0
    """Time that shows in no part."""

    drift: float = 0.0
    link_share: float = 0.9
    profiled: bool = True
    reserved: float | None = None
    """Of the device's memory; None for what the plan has."""

    torn: float = 1.03
    stage_s: float = 0.0
    restarts: int = 0
    evaluations: int = 0
    pause_s: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.noise = random.Random(self.seed)
        self.now = BEGAN
        assert self.plan.forecast is not None
        self.terms = self.plan.forecast.terms
        self.planned_s = self.plan.forecast.step_s

    def say(self, event: str, **fields: Any) -> None:
        """Add an event."""
        self.events.append({"event": event, "time": self.now, **fields})

    @property
    def compute_s(self) -> float:
        """Of kernels."""
        return sum(self.terms[name] for name in COMPUTE) * self.compute_factor

    @property
    def step_s(self) -> float:
        """Of a usual step."""
        more = (self.compute_factor - 1) * self.compute_s / self.compute_factor
        parts = (self.data_s, self.late_s, self.exposed_s, self.idle_s, self.copies_s, self.other_s)
        return self.planned_s + more + sum(parts)

    def run(self) -> Case:
        """All events, as the doctor reads them."""
        self._start(0)
        backs = {STEPS * (k + 1) // (self.restarts + 1) for k in range(self.restarts)}
        step, seen = 0, set[int]()
        while step < STEPS:
            step += EVERY
            self._step(step)
            if step in backs and step not in seen:
                seen.add(step)
                self.now += 120
                self.say("restart", reason="rank 3 failed: killed by signal SIGKILL", number=1)
                step = max(0, step - STEPS // (2 * self.restarts + 1))
                self._start(step)
        self.say("end", step=STEPS, finished=True)
        record = RunRecord(
            path=Path("made"), name="made", plan=self.plan, planned_at=BEGAN, config="",
            events=tuple(self.events), checkpoints=(), notes=(),
        )  # fmt: skip
        return Case(run=record)

    def _start(self, step: int) -> None:
        self.say("data", tokens=10**9, tokenizer="byte", skipped=[])
        self.now += 20
        self.say("start", step=step, world_size=self.plan.world_size)

    def _step(self, step: int) -> None:
        place = step / STEPS
        seconds = self.step_s * (1 + self.drift * place) * (1 + 0.015 * self.noise.gauss(0, 1))
        if self.pause_s and step % 70 == 0:
            seconds += self.pause_s
        self.now += seconds * EVERY
        capacity = self.plan.cluster.memory_bytes
        memory = self.plan.memory
        reserved, allocated = memory.reserved, memory.allocated
        if self.reserved is not None:
            reserved = round(self.reserved * capacity)
            allocated = round(reserved / self.torn)
        self.say(
            "step", step=step, num_steps=STEPS, loss=2 + 8 / step, grad_norm=0.8, lr=1e-4,
            step_s=seconds, tokens=step * self.plan.tokens_per_step,
            tokens_per_s=self.plan.tokens_per_step / seconds / self.plan.world_size,
            efficiency=None,
            memory={"allocated": allocated, "reserved": reserved},
            memory_capacity=capacity, data_share=min(0.99, 0.002 + self.data_s / seconds),
        )  # fmt: skip
        if step % 20 == 0 and self.plan.decided.shard > 1:
            self._collectives(step)
        if step == 50 and self.profiled:
            self._profile(step, seconds)
        if self.stage_s and step % 50 == 0:
            self.now += self.stage_s
            self.say("checkpoint", step=step, stage_s=self.stage_s, write_s=30.0, error=None)
        if self.evaluations and step % (STEPS // self.evaluations) == 0:
            self.now += 0.3 * self.step_s * STEPS / self.evaluations
            self.say("eval", step=step, loss=2.5)

    def _collectives(self, step: int) -> None:
        decided, fabric = self.plan.decided, self.plan.cluster.fabric
        size, count = 400e6, 64
        expected = bus_rate("all_gather", size, decided.shard,
                            fabric.seconds("all_gather", size, decided.shard))  # fmt: skip
        moved = 2 * size * count / expected
        share = self.link_share * moved / (moved + self.late_s)
        rows = [
            {"kind": "all_gather", "phase": "forward", "count": count, "p50_s": 0.01,
             "p99_s": 0.02, "bytes": round(size * count), "slowest_unit": "layers.7",
             "bus_bytes_per_s": expected * share * (1 + 0.05 * self.noise.gauss(0, 1))}
        ]  # fmt: skip
        late = self.late_s > 0.1 * self.step_s
        straggler = {"rank": 5, "behind_s": self.late_s} if late else None
        self.say("collectives", step=step, rows=rows, straggler=straggler)

    def _profile(self, step: int, seconds: float) -> None:
        exposed = self.terms["exposed"] + self.terms["waiting"] + self.exposed_s + self.late_s
        copies = self.terms["copies"] + self.terms["offload"] + self.copies_s
        compute = self.compute_s * (1 + 0.02 * self.noise.gauss(0, 1))
        idle = max(0.0, seconds - exposed - copies - compute)
        self.say(
            "profile", step=step, steps=3, rank=0, step_s=seconds, compute_share=compute / seconds,
            exposed_share=exposed / seconds, copies_share=copies / seconds,
            idle_share=idle / seconds, communication_s=exposed, rows=[],
            gaps=12.0 + 400 * self.idle_s,
        )  # fmt: skip


Make = Callable[[Plan, int, float], Made]


def _of(part: str, plan: Plan, seed: int, cost: float, **more: Any) -> Made:
    """A part of a step that takes `cost` of the planned step more."""
    assert plan.forecast is not None
    return Made(plan, seed, **{part: cost * plan.forecast.step_s}, **more)


def _throttled(plan: Plan, seed: int, cost: float) -> Made:
    # The third is not profiled, and gets hot as it goes.
    if seed % 3 == 2:
        return Made(plan, seed, drift=2 * cost, profiled=False)
    return Made(plan, seed, compute_factor=1 + 1.3 * cost)


def _recomputing(plan: Plan, seed: int, cost: float) -> Made:
    names = [f"model={plan.model.name}", f"cluster={plan.cluster.name}", "train.micro_batch=1"]
    own = plan_of(*names, "memory.checkpoint_activations=full")
    return Made(own, seed, reserved=0.45)


def _stalled(plan: Plan, seed: int, cost: float) -> Made:
    assert plan.forecast is not None
    return Made(plan, seed, stage_s=50 * cost * plan.forecast.step_s, profiled=False)


CAUSES: dict[str, tuple[str, Make]] = {
    "SW401": ("input", partial(_of, "data_s")),
    "SW402": ("late rank", partial(_of, "late_s")),
    "SW403": ("slow links", partial(_of, "exposed_s", link_share=0.2)),
    "SW404": ("exposed communication", partial(_of, "exposed_s")),
    "SW405": ("throttled clocks", _throttled),
    "SW406": ("recompute", _recomputing),
    "SW407": ("fragmentation", partial(_of, "other_s", reserved=0.96, torn=1.3, profiled=False)),
    "SW408": ("checkpoints", _stalled),
    "SW410": ("restarts", lambda plan, seed, cost: Made(plan, seed, restarts=3 + seed % 3)),
    "SW411": ("host", partial(_of, "idle_s")),
}
# Others that the doctor knows, one run each.
MORE: dict[str, tuple[str, Make]] = {
    "SW412": ("host copies", partial(_of, "copies_s")),
    "SW413": ("evaluations", lambda plan, seed, cost: Made(plan, seed, evaluations=20)),
    "SW414": ("pauses", lambda plan, seed, cost: _of("pause_s", plan, seed, 10 * cost)),
    "SW419": ("nothing recorded", partial(_of, "other_s", profiled=False)),
}
COSTS = (0.25, 0.4, 0.8)


@dataclass(frozen=True)
class MadeRun:
    """A run, and the cause that was put into it."""

    cause: str
    words: str
    case: Case


def made_runs() -> Iterator[MadeRun]:
    """Thirty runs of ten causes, each with a second, smaller cause beside it."""
    for number, (cause, (words, make)) in enumerate(CAUSES.items()):
        for seed, (place, cost) in enumerate(zip(PLACES, COSTS, strict=True)):
            made = make(plan_of(*place), 3 * number + seed, cost)
            # Some data to wait for, or some of another part.
            beside = ("data_s", "idle_s", "exposed_s")[(number + seed) % 3]
            if getattr(made, beside) == 0.0:
                # What recompute and restarts cost is not chosen: about a tenth.
                third = 0.05 if cause in ("SW406", "SW410") else cost / 3
                setattr(made, beside, third * made.planned_s)
            # Where the record alone should do, every third run is not profiled.
            if seed == 2 and cause in ("SW401", "SW402", "SW403", "SW410"):
                made.profiled = False
            yield MadeRun(cause, words, made.run())


def healthy_run(plan: Plan, seed: int, *, profiled: bool = True) -> Case:
    """A run that meets its plan."""
    return Made(plan, seed, profiled=profiled, stage_s=2.0).run()


def main() -> None:
    good = 0
    rows = list(made_runs())
    print(f"{'cause':24}{'id':8}{'plan':28}{'named, with its share of the time'}")
    for row in rows:
        plan, named = row.case.run.plan, rank_causes(row.case)
        assert plan is not None
        told = ", ".join(f"{f.check.id} {lost.share:.0%}" for f, lost in named[:3]) or "nothing"
        good += bool(named) and named[0][0].check.id == row.cause
        print(f"{row.words:24}{row.cause:8}{plan.model.name + ' ' + plan.cluster.name:28}{told}")
    print(f"the right cause is named first in {good} of {len(rows)}")


if __name__ == "__main__":
    main()
