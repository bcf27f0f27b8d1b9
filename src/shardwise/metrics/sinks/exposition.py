"""The state of a run as Prometheus sees it, made from its events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shardwise.metrics.events import Event
from shardwise.metrics.goodput import Productive
from shardwise.metrics.monitoring import metric_names

# What a label may hold. Anything else becomes `other`, so that no event can grow the page.
KINDS = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"})
PHASES = frozenset({"forward", "backward", "optimizer", "step", "eval", "checkpoint", "other"})
# One step's traffic has far fewer rows of (kind, phase) than this.
MAX_ROWS = 64

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank knows about its run without an event."""

    job: str
    rank: int
    log_every: int
    checkpoint_every: int

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports the whole run. First ranks of other nodes report
        themselves only."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """Cumulative counts by upper bound, since the ranks started."""

    buckets: list[tuple[str, float]]
    sum: float


class Exposition(Collector):
    """Turns events into series. `see` and `collect` run in different threads."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._values: dict[tuple[metric_names.Metric, Labels], float] = {}
        self._histograms: dict[metric_names.Metric, HistogramSample] = {}
        self._productive = Productive()
        self.version = 0
        self._on: dict[str, Callable[[Event], None]] = {"step": self._own_step}
        self._on["start"] = self._own_start
        if told.is_first:
            self._begin()

    def see(self, event: Event) -> None:
        """Take one event."""
        with self._lock:
            if (take := self._on.get(event["event"])) is not None:
                take(event)
                self.version += 1

    def collect(self) -> Iterable[Metric]:
        """All families, each with its series."""
        with self._lock:
            return list(self._families())

    def _begin(self) -> None:
        """Set all counters to zero: an alert on a rise needs to see them at zero first."""
        self._on |= {
            "start": self._start,
            "step": self._step,
            "eval": self._eval,
            "resume": self._resume,
            "rollback": self._rollback,
            "checkpoint": self._checkpoint,
            "checkpoint_failed": lambda event: self._count(metric_names.CHECKPOINT_FAILURES),
            "checkpoint_damaged": lambda event: self._count(metric_names.CHECKPOINTS_DAMAGED),
            "nonfinite": lambda event: self._count(metric_names.NONFINITE),
            "restart": lambda event: self._count(metric_names.RESTARTS),
            "collectives": self._collectives,
            "pipeline": self._pipeline,
        }
        for metric in metric_names.METRICS:
            if metric.kind == "counter":
                self._set(metric, 0.0)
        if self._told.checkpoint_every > 0:
            self._set(metric_names.CHECKPOINT_INTERVAL, self._told.checkpoint_every)
            self._set(metric_names.CHECKPOINT_STEP, 0)

    def _own_start(self, event: Event) -> None:
        self._set_own(metric_names.LAST_STEP, event["time"])

    def _own_step(self, event: Event) -> None:
        self._set_own(metric_names.LAST_STEP, event["time"])
        self._set_own(metric_names.STEP_DURATION, event["step_s"])
        self._set_own(metric_names.LOG_INTERVAL, event["step_s"] * self._told.log_every)
        self._set_own(metric_names.DATA_WAIT, event["data_share"])
        self._set_own(metric_names.MEMORY_CAPACITY, event["memory_capacity"])
        for state in ("allocated", "reserved"):
            self._set_own(metric_names.MEMORY, event["memory"][state], state)

    def _start(self, event: Event) -> None:
        self._own_start(event)
        self._productive.see(event)
        self._set(metric_names.STEP, event["step"])
        # Histograms belong to one start. A new start begins at zero, as Prometheus expects of a
        # reset.
        self._histograms.clear()

    def _step(self, event: Event) -> None:
        self._own_step(event)
        self._count(metric_names.PRODUCTIVE, self._productive.see(event))
        self._set(metric_names.STEP, event["step"])
        self._set(metric_names.STEPS_PLANNED, event["num_steps"])
        self._set(metric_names.LOSS, event["loss"])
        # Records that are older have neither.
        self._set(metric_names.AUX_LOSS, event.get("aux_loss"))
        self._set(metric_names.Z_LOSS, event.get("z_loss"))
        experts = event.get("experts") or {}
        self._set(metric_names.EXPERT_LOAD, experts.get("most"))
        self._set(metric_names.EXPERT_LEAST, experts.get("least"))
        self._set(metric_names.EXPERT_ENTROPY, experts.get("entropy"))
        self._set(metric_names.EXPERT_DROPPED, experts.get("dropped"))
        self._set(metric_names.GRAD_NORM, event["grad_norm"])
        self._set(metric_names.LEARNING_RATE, event["lr"])
        self._set(metric_names.TOKENS_PER_S, event["tokens_per_s"])
        # Steps that are done again read no new tokens.
        self._set(metric_names.TOKENS, max(event["tokens"], self._values[metric_names.TOKENS, ()]))
        efficiency = event["efficiency"] or {}
        self._set(metric_names.MFU, efficiency.get("mfu"))
        self._set(metric_names.HFU, efficiency.get("hfu"))
        self._set(metric_names.MFU_PLANNED, event["mfu_planned"])

    def _eval(self, event: Event) -> None:
        self._set(metric_names.EVAL_LOSS, event["loss"])

    def _resume(self, event: Event) -> None:
        if self._told.checkpoint_every > 0:
            self._set(metric_names.CHECKPOINT_STEP, event["step"])

    def _rollback(self, event: Event) -> None:
        self._count(metric_names.ROLLBACKS)
        self._productive.see(event)

    def _checkpoint(self, event: Event) -> None:
        self._count(metric_names.CHECKPOINTS)
        if self._told.checkpoint_every > 0:
            self._set(metric_names.CHECKPOINT_STEP, event["step"])
        for phase in ("stage", "write", "commit"):
            self._set(metric_names.CHECKPOINT_SECONDS, event[f"{phase}_s"], phase)

    def _collectives(self, event: Event) -> None:
        self._forget(metric_names.COLLECTIVE_RATE, metric_names.STRAGGLER)
        for row in event["rows"][:MAX_ROWS]:
            kind, phase = _among(KINDS, row["kind"]), _among(PHASES, row["phase"])
            self._set(metric_names.COLLECTIVE_RATE, row.get("bus_bytes_per_s"), kind, phase)
        if (straggler := event.get("straggler")) is not None:
            self._set(metric_names.STRAGGLER, straggler["behind_s"], str(int(straggler["rank"])))
        for kind, seconds in (event.get("seconds") or {}).items():
            if kind in metric_names.HISTOGRAMS:
                self._histograms[metric_names.HISTOGRAMS[kind]] = _histogram(seconds)

    def _pipeline(self, event: Event) -> None:
        self._set(metric_names.BUBBLE, event["bubble"])
        self._set(metric_names.BUBBLE_PLANNED, event["planned"])
        for row in event["stages"]:
            stage = str(row["rank"])
            self._set(metric_names.STAGE_SECONDS, row["busy_s"], stage)
            for state in ("allocated", "reserved"):
                self._set(metric_names.STAGE_MEMORY, row[state], stage, state)

    def _set(self, metric: metric_names.Metric, value: float | None, *labels: str) -> None:
        """Set a value. An unknown value has no series, rather than an old one."""
        if value is None:
            self._values.pop((metric, labels), None)
        else:
            self._values[metric, labels] = float(value)

    def _set_own(self, metric: metric_names.Metric, value: float | None, *labels: str) -> None:
        self._set(metric, value, str(self._told.rank), *labels)

    def _count(self, metric: metric_names.Metric, amount: float = 1.0) -> None:
        self._values[metric, ()] = self._values.get((metric, ()), 0.0) + amount

    def _forget(self, *metrics: metric_names.Metric) -> None:
        for key in [key for key in self._values if key[0] in metrics]:
            del self._values[key]

    def _families(self) -> Iterator[Metric]:
        for metric in metric_names.METRICS:
            if metric.kind == "histogram":
                yield from self._histogram_families(metric)
                continue
            series = [(key[1], value) for key, value in self._values.items() if key[0] is metric]
            if series:
                make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = make(
                    metric.name, metric.meaning, labels=[metric_names.JOB, *metric.labels]
                )
                for labels, value in series:
                    family.add_metric([self._told.job, *labels], value)
                yield family

    def _histogram_families(self, metric: metric_names.Metric) -> Iterator[Metric]:
        found = self._histograms.get(metric)
        if found is not None:
            family = HistogramMetricFamily(metric.name, metric.meaning, labels=[metric_names.JOB])
            family.add_metric([self._told.job], buckets=found.buckets, sum_value=found.sum)
            yield family


def _histogram(seconds: dict[str, Any]) -> HistogramSample:
    """Cumulative buckets; the last one, +Inf, holds them all."""
    bounds = [(_spell_bound(bound), float(count)) for bound, count in seconds["buckets"]]
    finite = [(bound, count) for bound, count in bounds if bound != "+Inf"]
    return HistogramSample([*finite, ("+Inf", float(seconds["count"]))], float(seconds["sum"]))


def _spell_bound(bound: float | str | None) -> str:
    """A bound as Prometheus writes it. JSON has no infinity, so it may be missing or text."""
    return "+Inf" if bound is None or float(bound) == float("inf") else repr(float(bound))


def _among(known: frozenset[str], word: str) -> str:
    return word if word in known else "other"
