"""Rank 0 without a device: one step on fake tensors gives exact bytes and every collective."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from shardwise.data.loader import MicroBatch
from shardwise.plan.decisions import Choice
from shardwise.plan.planned import Plan
from shardwise.training.surroundings import steady_collector
from shardwise.tunnel.emulate import Emulator
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.fakes import OperatorObserver, fake_tensors
from shardwise.tunnel.ledger import Class, Ledger, Peak, resizes_seen
from shardwise.tunnel.link_clock import StoppedClock
from shardwise.tunnel.rank_zero import Rank, fill_rank, plan_on, shard_rank
from shardwise.tunnel.result import Memory, TunnelResult
from shardwise.tunnel.traffic import Traffic
from shardwise.tunnel.world import rank_zero_of

# What CPU offload keeps in host memory.
_OFFLOADED: tuple[Class, ...] = ("params", "grads", "optimizer")
Tell = Callable[[str], None]


def tell_nobody(stage: str) -> None:
    """For callers that show no progress."""


def run_fake(plan: Plan, links: Links, tell: Tell = tell_nobody) -> TunnelResult:
    """One optimizer step of the real code, after Adam has its state."""
    with warnings.catch_warnings():
        # What torch warns of is about tensors that are not there, and not about the run.
        warnings.simplefilter("ignore")
        return _run(plan, links, tell)


def _run(plan: Plan, links: Links, tell: Tell) -> TunnelResult:
    here = plan_on(plan, "cpu", compiled=False).with_choices(
        offload_activations=Choice(0.0, "fake tensors have no memory to copy", "rule"),
        gather_in_place=Choice(False, "a first all-gather finds the memory to use", "rule"),
    )
    ledger = Ledger()
    notes: list[str] = []
    emulator = Emulator(
        links, StoppedClock(), on_buffer=lambda buffer: ledger.classify([buffer], "gathered")
    )
    with rank_zero_of(plan.world_size), steady_collector():
        tell(f"building {plan.model.name} as rank 0 of {plan.world_size}")
        shell = shard_rank(here, emulator)
        groups = shell.mesh.groups
        with fake_tensors():
            tell("giving it storage, an optimizer and data")
            rank = fill_rank(shell, notes.append, has_values=False)
            batches = [_without_values(batch) for batch in rank.loader.step_batches(0)]
            with OperatorObserver(Ledger(), Traffic(), links, groups):
                tell("a first update, which makes the optimizer's state")
                _make_first_update(rank)
            _open_ledger(ledger, rank, batches, tell)
            with resizes_seen(ledger), OperatorObserver(ledger, emulator.traffic, links, groups):
                rank.stepper.run(batches, here.settings.optim.lr)
    return TunnelResult(
        plan=plan,
        mode="fake",
        device_name="fake tensors",
        links=links,
        memory=_memory(ledger.peak(_OFFLOADED if here.decided.offload else ())),
        timing=None,
        collectives=emulator.traffic.items,
        notes=[*notes, *_notes(plan)],
    )


def _without_values(batch: MicroBatch) -> MicroBatch:
    inputs, labels = torch.empty_like(batch.inputs), torch.empty_like(batch.labels)
    return MicroBatch(inputs, labels, batch.num_valid_tokens)


def _make_first_update(rank: Rank) -> None:
    """Make one update before the step.

    From the second step on, Adam's moments exist, and DTensor knows the shapes of sharded tensors.
    It infers each shape once on fake tensors, which would otherwise be counted as the step's.
    """
    for param in rank.params:
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    loss = torch.zeros((), device=rank.session.device)
    rank.stepper.update(rank.session.plan.settings.optim.lr, loss)


def _open_ledger(
    ledger: Ledger, rank: Rank, batches: list[MicroBatch], tell: Tell = tell_nobody
) -> None:
    """Record what is allocated before the step, and follow the step."""
    model, optimizer = rank.session.model, rank.session.optimizer
    ledger.classify(model.buffers(), "other")
    ledger.classify([tensor for b in batches for tensor in (b.inputs, b.labels)], "other")
    ledger.classify(rank.params, "params")
    ledger.classify(rank.optimizer_state, "optimizer")
    sum_loss = model.sum_loss

    def enter_head(*_: Any) -> None:
        ledger.moment = "loss"

    number = 0

    def enter_backward(grad: Tensor) -> None:
        ledger.moment = "backward"
        tell(f"one step: backward of pass {number} of {len(batches)}")

    def enter_update(*_: Any) -> None:
        ledger.moment = "update"
        tell("one step: update")
        ledger.classify(rank.grads, "grads")

    def followed_loss(*batch: Tensor, **more: Any) -> Tensor:
        nonlocal number
        ledger.moment, number = "forward", number + 1
        tell(f"one step: forward of pass {number} of {len(batches)}")
        loss: Tensor = sum_loss(*batch, **more)
        loss.register_hook(enter_backward)
        return loss

    model.sum_loss = followed_loss
    optimizer.register_step_pre_hook(enter_update)
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(enter_head)


def _memory(peak: Peak) -> Memory:
    return Memory(
        allocated_bytes=peak.total,
        reserved_bytes=None,
        classes={name: peak.classes.get(name, 0) for name in get_args(Class)},
        largest={name: peak.largest.get(name, 0) for name in get_args(Class)},
        moment=peak.moment,
    )


def _notes(plan: Plan) -> list[str]:
    notes = ["nothing was computed, so there is no time to measure; bytes are those of tensors"]
    if plan.decided.compile:
        notes.append("torch.compile is off on fake tensors; compiled blocks keep fewer activations")
    if plan.decided.loss == "chunked" and plan.choices["loss"].source != "user":
        notes.append("the loss is assumed to be chunked; a run first checks that on its weights")
    if plan.decided.gather_in_place:
        notes.append("a run gathers in place; these bytes include buffers that it does not need")
    if plan.decided.offload_activations:
        notes.append("activations that would wait in host memory are part of these bytes")
    if plan.decided.offload:
        notes.append("parameters, gradients and Adam are on the host, and not part of these bytes")
    return notes
