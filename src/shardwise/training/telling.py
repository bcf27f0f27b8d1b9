"""What a run reports while it trains, on the console and in its record."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from shardwise.data.splits import DataSplits
from shardwise.metrics.callbacks import StepLogged
from shardwise.metrics.collectives import CollectiveTimer
from shardwise.metrics.progress_line import StepReport, format_line
from shardwise.metrics.stage_figures import StageFigures
from shardwise.parallel.mesh import World
from shardwise.parallel.torchao_float8 import float8_layers
from shardwise.plan.planned import Plan
from shardwise.plan.stage_rows import planned_bubble
from shardwise.training.channels import Channels
from shardwise.training.model_lines import float8_table, notes_of, unit_table
from shardwise.training.reached import Reached
from shardwise.training.session import Session, length_order
from shardwise.training.surroundings import device_name
from shardwise.units import format_bytes, format_count


def tell_session(session: Session, channels: Channels) -> None:
    """Report the units of the model, what float8 changes, and the data."""
    data, units, plan = session.data, session.units, session.plan
    layers = float8_layers(session.model, units, plan)
    tables = [*unit_table(units, plan, layers), *float8_table(layers, plan)]
    for line in [*tables, *notes_of(units, plan, session.mesh.world)]:
        channels.say(line)
    channels.say(device_line(plan, session.mesh.world))
    for record in data.skipped:
        channels.say(f"skipped record {record}")
    if not data.mixed:
        channels.say(data_line(data, plan))
    for line in mixture_lines(data, plan):
        channels.say(line)
    found: dict[str, Any] = {}
    if data.conversations is not None:
        for line in data.conversations.in_words(plan.settings.data.seq_len):
            channels.say(line)
        if order := length_order(plan, data):
            share = f"{order.padding_share():.1%} of the first ones"
            channels.say(f"batches are of similar lengths: {share} is padding")
        found = data.conversations.counts
    if data.mixed:
        found["mixture"] = {each.name: each.share for each in data.mixed}
    channels.events.write(
        "data",
        documents=data.num_documents,
        tokens=data.num_train_tokens,
        tokenizer=data.tokenizer_identity,
        skipped=list(data.skipped),
        **found,
    )


def device_line(plan: Plan, world: World) -> str:
    """What the ranks of the run compute on."""
    held = format_bytes(plan.cluster.memory_bytes)
    return f"device: {world.size} x {device_name(plan)}, {held} each"


def data_line(data: DataSplits, plan: Plan) -> str:
    """What there is to train on, and how often the run reads it."""
    if not data.num_documents:
        return "data: random tokens, none of them read twice"
    steps = plan.settings.train.steps
    passes = steps * plan.decided.global_batch / data.num_sequences
    tokens = f"{format_count(data.num_train_tokens)} tokens"
    read = f"read {passes:.3g} times in {steps:,} steps"
    return f"data: {_documents_in_words(data, plan)}, {tokens}, {read}"


def mixture_lines(data: DataSplits, plan: Plan) -> Iterator[str]:
    """The share of each dataset of a mixture, and how often the run reads it."""
    num_sequences = plan.settings.train.steps * plan.decided.global_batch
    for each in data.mixed:
        size = f"{len(each.splits.train):,} sequences, {each.splits.num_train_tokens:,} tokens"
        if each.splits.num_documents:
            size = f"{_documents_in_words(each.splits, plan)}, {size}"
        passes = each.passes(num_sequences)
        yield f"data {each.name}: {each.share:.1%} of what is read; read {passes:.3g} times"
        yield f"  {size}"
        if each.splits.conversations is not None:
            for line in each.splits.conversations.in_words(plan.settings.data.seq_len):
                yield f"data {each.name}: {line}"


def _documents_in_words(data: DataSplits, plan: Plan) -> str:
    plural = "" if data.num_documents == 1 else "s"
    return f"{data.num_documents:,} {plan.settings.data.unit}{plural}"


def tell_step(report: StepReport, channels: Channels, plan: Plan) -> None:
    """Print the line of a logged step."""
    channels.say(format_line(report, plan.cluster.device))
    channels.events.write("step", **asdict(report))
    figures = ("step", "num_steps", "loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s")
    named = {name: getattr(report, name) for name in figures}
    channels.callbacks.tell(StepLogged(run_dir=plan.run_dir, **named))


def tell_stages(figures: StageFigures, step: int, plan: Plan, channels: Channels) -> None:
    """Report how much of their time ranks of a pipeline waited for each other, beside the plan's
    share, and what each of them did and held."""
    planned, share = planned_bubble(plan), figures.bubble
    stages = [asdict(each) for each in figures.ranks]
    channels.events.write("pipeline", step=step, bubble=share, planned=planned, stages=stages)
    if step == plan.settings.train.steps:
        told = f"bubble: ranks waited {share:.0%} of forwards and backwards, {planned:.0%} planned"
        channels.say(told)


def tell_collectives(timer: CollectiveTimer, step: int, step_s: float, channels: Channels) -> None:
    """Report how long collectives took, and which rank the others wait for. All ranks call it
    together."""
    before = timer.late_rank
    found = timer.report(step_s)
    if found is None:
        return
    channels.events.write("collectives", step=step, **found)
    late, rank = found["straggler"], timer.late_rank
    # This is printed once. The record repeats it for as long as it lasts.
    if late is not None and rank != before:
        channels.say(
            f"ALERT: the other ranks wait {1e3 * late['behind_s']:.0f} ms per step for rank {rank}"
        )
    elif late is None and before is not None:
        channels.say(f"rank {before} is in step with the others again")


def tell_scale(scale: float, overflows: int, step: int, channels: Channels) -> None:
    """Report steps that were computed more than once, because they took longer."""
    channels.say(
        f"loss scale {scale:g} from step {step} on: fp16 gradients overflowed with a larger one"
    )
    channels.events.write("loss_scale", step=step, scale=scale, overflows=overflows)


def tell_skip(plan: Plan, reached: Reached, grad_norm: float, channels: Channels) -> None:
    """Report a batch without a finite loss and gradient. It has changed nothing but the
    position."""
    batch, size = reached.position - 1, plan.decided.global_batch
    first = batch * size + reached.shift
    is_norm = not math.isfinite(grad_norm)
    what = f"gradient norm {grad_norm}" if is_norm else "a loss that is not finite"
    channels.say(
        f"ALERT: {what} in batch {batch} at step {reached.step + 1}; skipped "
        f"({reached.bad_in_a_row} in a row)"
    )
    channels.events.write(
        "nonfinite",
        step=reached.step + 1,
        batch=batch,
        sequences=[first, first + size],
        in_a_row=reached.bad_in_a_row,
    )
