"""The last lines of a run: what it did, from its own record."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from shardwise.checkpoint.store import list_checkpoints
from shardwise.metrics.events import read_whole_events
from shardwise.plan.planned import Plan
from shardwise.units import GIB, format_count, speed_unit
from shardwise.verify.gates import Gate

_WIDTH = 80
Events = Sequence[dict[str, Any]]
# Verdicts that need no line of their own.
_QUIET = {"pass": "passed", "skip": "not judged"}


def summary_lines(plan: Plan, gates: Sequence[Gate]) -> Iterator[str]:
    """Steps, losses, speed, memory, gates, where things lie."""
    events = read_whole_events(plan.run_dir / "events.jsonl")
    steps = [step for step in _of(events, "step") if {"tokens", "memory_planned"} <= step.keys()]
    if not steps:
        yield from _unpassed_lines([gate for gate in gates if gate.name == "record"])
        return
    last, total = steps[-1], plan.config.train.steps
    resumed = len(_of(events, "resume"))
    times = f", resumed {resumed} time{'s' * (resumed > 1)}" if resumed else ""
    yield f"{last['step']} of {total} steps, {format_count(last['tokens'])} tokens{times}"
    yield f"  training loss  {steps[0]['loss']:.4f} -> {last['loss']:.4f}"
    evals = _of(events, "eval")
    if evals:
        fall = evals[0]["loss"] - evals[-1]["loss"]
        first, final = evals[0]["loss"], evals[-1]["loss"]
        told = [each["preference"]["accuracy"] for each in evals if each.get("preference")]
        # The loss of a comparison is not in nats of a token.
        how = f"accuracy {told[0]:.1%} -> {told[-1]:.1%}" if told else f"fell by {fall:.2f} nats"
        yield f"  held-out loss  {first:.4f} -> {final:.4f}  ({how})"
    yield from _best_lines(plan, evals)
    yield _speed_line(plan, steps)
    yield _memory_line(last)
    yield from _gate_lines(gates)
    yield from _field("run directory", f"{plan.run_dir}: {', '.join(_contents(plan.run_dir))}")


def last_step(plan: Plan) -> int | None:
    """The last step that the record has; None for a run that made none."""
    steps = _of(read_whole_events(plan.run_dir / "events.jsonl"), "step")
    return steps[-1]["step"] if steps else None


def has_ended_early(plan: Plan) -> bool:
    """Whether the run ended because its held-out loss fell no more."""
    ends = _of(read_whole_events(plan.run_dir / "events.jsonl"), "end")
    return bool(ends) and ends[-1].get("early") is True


def _best_lines(plan: Plan, evals: Events) -> Iterator[str]:
    """The best step, where it is not the last one or was kept on purpose."""
    best = [event for event in evals if event.get("best") is True]
    if best and (best[-1] is not evals[-1] or plan.settings.checkpoint.keep_best is True):
        step, loss = best[-1]["step"], best[-1]["loss"]
        kept = {found.step for found in list_checkpoints(plan.run_dir / "checkpoints")}
        how = "kept; --best names it" if step in kept else "not kept"
        yield f"  best           {loss:.4f} at step {step} ({how})"


def _speed_line(plan: Plan, steps: Events) -> str:
    # The first logged step of every start holds warm-up and compilation.
    steady = [step["tokens_per_s"] for step in steps[1:]] or [steps[0]["tokens_per_s"]]
    unit = speed_unit(plan.cluster.device)
    speed = f"  median speed   {format_count(statistics.median(steady))} {unit}"
    shares = [step["efficiency"]["mfu"] for step in steps[1:] if step["efficiency"]]
    if shares:
        speed += f", mfu {statistics.median(shares):.1%}"
    if plan.forecast is not None:
        speed += f", plan {format_count(plan.forecast.tokens_per_s)}"
    return speed


def _memory_line(last: dict[str, Any]) -> str:
    memory = last["memory"]
    held = f"{memory['reserved'] / GIB:.1f} GiB reserved, {memory['allocated'] / GIB:.1f} allocated"
    return f"  peak memory    {held}, plan {last['memory_planned'] / GIB:.1f}"


def _gate_lines(gates: Sequence[Gate]) -> Iterator[str]:
    """The gates that passed, those not judged, and one line with advice for each of the others."""
    named = [
        f"{word}: {', '.join(gate.name for gate in gates if gate.verdict == verdict)}"
        for verdict, word in _QUIET.items()
        if any(gate.verdict == verdict for gate in gates)
    ]
    for group in named:
        yield from _field("gates", group)
    yield from _unpassed_lines(gates)


def _unpassed_lines(gates: Sequence[Gate]) -> Iterator[str]:
    for gate in gates:
        if gate.verdict not in _QUIET:
            found = f"{gate.name}: {gate.figure}, bound: {gate.bound}"
            yield f"  gate {gate.verdict:<9} {found}; {gate.advice}"


def _field(name: str, text: str) -> list[str]:
    """A figure in lines that fit; paths stay whole."""
    return wrap(
        f"{name:<13}  {text}", _WIDTH, initial_indent="  ", subsequent_indent=" " * 17,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _of(events: Events, kind: str) -> Events:
    return [event for event in events if event["event"] == kind]


def _contents(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir() if not path.name.startswith("."))
