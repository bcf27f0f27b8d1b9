"""Gates: figures of a run that must hold, each with its bound, its verdict and what to do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.config.schema import GatesConfig
from shardwise.metrics.read_events import Record
from shardwise.metrics.verdict import plan_misses
from shardwise.plan.planned import Plan
from shardwise.units import GIB, format_bytes

Verdict = Literal["pass", "warn", "fail", "skip"]
Steps = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Gate:
    """One figure, judged."""

    name: str
    figure: str
    bound: str
    verdict: Verdict
    advice: str = ""
    """What to do where it failed, or why it was not judged."""


def check_gates(plan: Plan, events: Steps, damaged: Sequence[str]) -> list[Gate]:
    """All gates of a run; `damaged` names its checkpoints that are not whole."""
    gates, steps = plan.settings.gates, _last_of_each_step(events)
    if not steps:
        return [Gate("steps", "none", "at least one", "fail", "the run has logged no step yet")]
    late = [e for e in events if e["event"] == "collectives" and e["straggler"]]
    return [
        _mfu_gate(gates, steps),
        _memory_gate(gates, steps[-1]),
        _steady_gate(gates, plan, steps),
        _loss_gate(plan, steps),
        _gradient_gate(gates, steps),
        _plan_gate(plan, steps),
        _straggler_gate(late),
        _overlap_gate(gates, plan, [event for event in events if event["event"] == "profile"]),
        _checkpoint_gate(damaged),
    ]


def check_record(record: Record) -> list[Gate]:
    """One gate where lines of the record had to be left out of the others, else none."""
    if not record.num_malformed:
        return []
    figure = f"{record.num_malformed} of {record.num_lines} lines malformed"
    advice = (
        f"the other gates ignore them; the first is line {record.first_malformed} of events.jsonl; "
        "a kill has cut it off, or the file was changed"
    )
    return [Gate("record", figure, "all whole", "warn", advice)]


def _last_of_each_step(events: Steps) -> list[dict[str, Any]]:
    """Step events in order. Of a step that was repeated after a restart, the last event counts."""
    found = {event["step"]: event for event in events if event["event"] == "step"}
    return [found[step] for step in sorted(found)]


def _steady(steps: Steps) -> Steps:
    """The steps without the first logged one, which holds compilation and warm-up."""
    return steps[1:] or steps


def _mfu_gate(gates: GatesConfig, steps: Steps) -> Gate:
    shares = [s["efficiency"]["mfu"] for s in _steady(steps) if s["efficiency"] is not None]
    bound = f"at least {gates.min_mfu:.0%}"
    if not shares:
        why = "the device's peak is not known; set cluster.peak_tflops"
        return Gate("mfu", "-", bound, "skip", why)
    found = statistics.median(shares)
    advice = "compare with `shardwise plan`, then `shardwise tunnel`: compute, links or data?"
    return _judged("mfu", f"{found:.1%}", bound, found >= gates.min_mfu, advice)


def _memory_gate(gates: GatesConfig, last: dict[str, Any]) -> Gate:
    held, capacity = last["memory"]["reserved"], last["memory_capacity"]
    share = held / capacity
    bound = f"at most {gates.max_memory:.0%} of {capacity / GIB:.0f} GiB"
    advice = "a smaller train.micro_batch, or more recompute: above this the allocator retries"
    figure = f"{format_bytes(held)} ({share:.0%})"
    return _judged("memory", figure, bound, share <= gates.max_memory, advice)


def _steady_gate(gates: GatesConfig, plan: Plan, steps: Steps) -> Gate:
    times = sorted(step["step_s"] for step in _steady(steps))
    bound = f"within ±{gates.step_spread:.0%}"
    if plan.cluster.device == "cpu":
        return Gate("step time", "-", bound, "skip", "ranks on one CPU disturb each other")
    if len(times) < 5:
        return Gate("step time", "-", bound, "skip", "fewer than five logged steps")
    middle = statistics.median(times)
    if not middle:
        return Gate("step time", "-", bound, "skip", "the record says that steps took no time")
    spread = max(
        times[int(0.9 * (len(times) - 1))] / middle - 1, 1 - times[len(times) // 10] / middle
    )
    advice = "look for a straggler, data waits or a throttled device in the report"
    return _judged("step time", f"±{spread:.1%}", bound, spread <= gates.step_spread, advice)


def _loss_gate(plan: Plan, steps: Steps) -> Gate:
    losses = [step["loss"] for step in steps]
    if not all(math.isfinite(loss) for loss in losses):
        return Gate("loss", "not finite", "finite", "fail", "lower optim.lr, or look at the data")
    quarter = max(1, len(losses) // 4)
    first, last = statistics.mean(losses[:quarter]), statistics.mean(losses[-quarter:])
    if len(losses) < 4:
        return Gate("loss", f"{losses[-1]:.4f}", "falls", "skip", "fewer than four logged steps")
    if plan.settings.data.source == "synthetic":
        why = "random tokens: there is nothing to learn"
        return Gate("loss", f"{first:.4f} -> {last:.4f}", "falls", "skip", why)
    advice = "check optim.lr and the schedule, and whether the data was seen before"
    return _judged("loss", f"{first:.4f} -> {last:.4f}", "falls", last < first, advice)


def _gradient_gate(gates: GatesConfig, steps: Steps) -> Gate:
    norms = [step["grad_norm"] for step in _steady(steps)]
    usual, largest = statistics.median(norms), max(norms)
    bound = f"at most {gates.grad_spike:g} x the median"
    good = math.isfinite(largest) and largest <= gates.grad_spike * usual
    advice = "a spike comes from the learning rate or the data, almost never from sharding"
    return _judged("gradient norm", f"{largest:.2f} (median {usual:.2f})", bound, good, advice)


def _plan_gate(plan: Plan, steps: Steps) -> Gate:
    if plan.forecast is None:
        return Gate(
            "plan", "-", "in its bands", "skip", "no rates are known: shardwise plan --calibrate"
        )
    misses = list(plan_misses(plan, steps))
    figure = f"{len(misses)} figures missed" if misses else "met"
    return _judged("plan", figure, "in its bands", not misses, "; ".join(misses))


def _straggler_gate(late: Steps) -> Gate:
    """`late` are the reports that name a rank."""
    if not late:
        return Gate("ranks", "in step", "none late", "pass")
    worst = max((each["straggler"] for each in late), key=lambda found: float(found["behind_s"]))
    steps = [each["step"] for each in late if each["straggler"]["rank"] == worst["rank"]]
    figure = f"rank {worst['rank']} {1e3 * worst['behind_s']:.0f} ms late"
    seen = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    advice = f"the others waited for it ({seen}): look at its device, its host, its data"
    return Gate("ranks", figure, "none late", "fail", advice)


def _overlap_gate(gates: GatesConfig, plan: Plan, profiles: Steps) -> Gate:
    """The gate on exposed communication. Only a profile shows what compute hid: a collective's
    own time includes it."""
    bound = f"at most {gates.max_exposed:.0%} of a step exposed"
    if plan.cluster.device == "cpu" or plan.world_size == 1:
        why = "a CPU waits in every collective, and a single rank has none"
        return Gate("overlap", "-", bound, "skip", why)
    if not profiles:
        return Gate("overlap", "-", bound, "skip", "no step was profiled: set observe.profile=20")
    share = profiles[-1]["exposed_share"]
    advice = (
        f"{_most_exposed(profiles[-1])}`shardwise profile` names the units; a larger "
        "train.micro_batch, shard.forward_prefetch, or a mesh that stays inside a node hides more"
    )
    return _judged("overlap", f"{share:.1%}", bound, share <= gates.max_exposed, advice)


def _most_exposed(profile: Mapping[str, Any]) -> str:
    """The axis along which the most is exposed, where that was measured."""
    if not profile.get("axes"):
        return ""
    most = max(profile["axes"], key=lambda row: row["exposed_s"])
    return f"most of it is along {most['axis']}; "


def _checkpoint_gate(damaged: Sequence[str]) -> Gate:
    figure = ", ".join(damaged) if damaged else "whole"
    advice = "shardwise checkpoint verify says what is wrong with each"
    return _judged("checkpoints", figure, "all whole", not damaged, advice)


def _judged(name: str, figure: str, bound: str, good: bool, advice: str) -> Gate:
    return Gate(name, figure, bound, "pass" if good else "fail", "" if good else advice)
