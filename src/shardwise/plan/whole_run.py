"""What the whole of a run comes to: its steps, tokens, time, cost, passes and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.plan.checkpoint_size import checkpoint_bytes
from shardwise.plan.planned import Plan
from shardwise.units import format_bytes, format_count, format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSize:
    """How many tokens there are to train on."""

    tokens: float | None
    """None where it is not known before the data is read."""

    words: str
    """How that is known, or why it is not."""

    parts: tuple[PartSize, ...] = ()
    """The datasets of a mixture; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """One dataset of a mixture."""

    name: str
    share: float
    size: DataSize


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPart:
    """What one dataset of a mixture has in a run."""

    name: str
    share: float
    tokens: float | None
    """Those that are read of it."""

    epochs: float | None
    """How often it is read."""

    data: str
    """What is known of its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """All steps of a run together. Start, evaluations and saves are left out of its time."""

    steps: int | None
    """None where it follows from epochs over data that was not read yet."""

    tokens: int | None
    seconds: float | None
    usd: float | None
    epochs: float | None
    data: str
    """What is known of the data's size."""

    checkpoint_bytes: int
    checkpoints_kept: int
    mixture: tuple[MixedPart, ...] = ()
    """By dataset; empty where there is one."""


def whole_run(plan: Plan, data: DataSize) -> WholeRun:
    """The run that the configuration asks for, over such data."""
    passes = plan.config.train.epochs
    knows_steps = passes is None or data.tokens is not None
    steps = plan.config.train.steps if knows_steps else None
    tokens = None if steps is None else steps * plan.tokens_per_step
    forecast = plan.forecast
    seconds = usd = None
    if forecast is not None and steps is not None and tokens is not None:
        seconds = steps * (forecast.step_s + (forecast.reference_s or 0.0))
        rate = forecast.usd_per_billion_tokens
        usd = None if rate is None else rate * tokens / 1e9 * seconds / (steps * forecast.step_s)
    return WholeRun(
        steps=steps,
        tokens=tokens,
        seconds=seconds,
        usd=usd,
        epochs=_passes(plan, tokens, data),
        data=data.words,
        checkpoint_bytes=checkpoint_bytes(plan),
        checkpoints_kept=plan.config.checkpoint.keep,
        mixture=tuple(_mixed(part, tokens) for part in data.parts),
    )


def _mixed(part: PartSize, tokens: int | None) -> MixedPart:
    own, held = None if tokens is None else tokens * part.share, part.size.tokens
    passes = None if own is None or not held else own / held
    return MixedPart(
        name=part.name, share=part.share, tokens=own, epochs=passes, data=part.size.words
    )


def mixture_rows(run: WholeRun) -> list[tuple[str, str, str, str, str]]:
    """(dataset, share, tokens, epochs, size) of each dataset, below their names."""
    rows = [
        (
            part.name,
            f"{part.share:.1%}",
            "-" if part.tokens is None else format_count(part.tokens),
            "-" if part.epochs is None else f"{part.epochs:.3g}",
            part.data,
        )
        for part in run.mixture
    ]
    return [("dataset", "share", "tokens", "epochs", "what it holds"), *rows]


def _passes(plan: Plan, tokens: int | None, data: DataSize) -> float | None:
    """Passes over the data: those that were asked for, or as many as the tokens are."""
    if plan.config.train.epochs is not None:
        return plan.config.train.epochs
    return None if tokens is None or data.tokens is None else tokens / data.tokens


def whole_run_rows(run: WholeRun) -> list[tuple[str, str]]:
    """(what, figure): the same names for every run, in the same order."""
    return [
        ("steps", "-" if run.steps is None else f"{run.steps:,}"),
        ("tokens", "-" if run.tokens is None else format_count(run.tokens)),
        ("time", "-" if run.seconds is None else format_duration(run.seconds)),
        ("cost", "-" if run.usd is None else f"USD {run.usd:,.0f}"),
        ("epochs", f"{'-' if run.epochs is None else f'{run.epochs:.3g}'} ({run.data})"),
        ("checkpoint", f"{format_bytes(run.checkpoint_bytes)}, {run.checkpoints_kept} kept"),
    ]
