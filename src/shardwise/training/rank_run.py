"""The run of one rank, from its channels and its session to the loop and its end."""

from __future__ import annotations

import torch

from shardwise.checkpoint.may_resume import validate_begin, validate_resume
from shardwise.lease.lease import UNFENCED, Fence
from shardwise.metrics.callbacks import Callbacks
from shardwise.metrics.collectives import CollectiveTimer
from shardwise.metrics.events import EventLog
from shardwise.metrics.sinks.open import open_sinks
from shardwise.parallel.mesh import World, build_mesh
from shardwise.plan.planned import Plan
from shardwise.plan.run_directory import write_run_directory
from shardwise.training.channels import Channels
from shardwise.training.epochs import settle_epochs
from shardwise.training.heartbeat import Heartbeat, Phase
from shardwise.training.joining import outer_step_of
from shardwise.training.loop import Loop
from shardwise.training.oom import start_history
from shardwise.training.resume import accept_resume, find_newest
from shardwise.training.session import Say, build_session
from shardwise.training.signals import stop_requests
from shardwise.training.surroundings import prepare_matmuls


def run(plan: Plan, say: Say, fence: Fence = UNFENCED, heartbeat: Heartbeat | None = None) -> None:
    """Train on this rank until the plan's last step, from the newest good checkpoint if any."""
    mesh = build_mesh(plan)
    world = mesh.world
    heartbeat = heartbeat or Heartbeat(world.rank, Phase.READING)
    with stop_requests() as stop, _open_events(plan, world, say, fence) as events:
        own = Callbacks(plan.settings.observe.callbacks if world.is_first else ())
        channels = Channels(events, say, stop, heartbeat, fence, own)
        torch.use_deterministic_algorithms(plan.settings.train.deterministic)
        prepare_matmuls(plan)
        world.decide(lambda: validate_resume(plan))
        found = find_newest(plan, world, channels)
        if found is None:
            world.decide(lambda: validate_begin(plan))
            world.decide(lambda: _write_as_holder(plan, fence))
        start_history(plan)
        timer = CollectiveTimer(torch.device(plan.cluster.device), world)
        times = plan.settings.observe.collectives and world.size > 1
        session = build_session(
            plan, mesh, say, resuming=found is not None, carrier=timer if times else None
        )
        session = settle_epochs(session, found, say)
        data = session.data.identity
        if found is None and session.plan is not plan:
            world.decide(lambda: _write_as_holder(session.plan, fence))
        accepted = None if found is None else accept_resume(session.plan, world, found, data)
        loop = Loop(session, channels, timer, outer_step_of(session, channels))
        try:
            loop.run(accepted)
        finally:
            loop.profiler.close()
            loop.saving.close()


def _write_as_holder(plan: Plan, fence: Fence) -> None:
    fence.validate()
    write_run_directory(plan)


def _open_events(plan: Plan, world: World, say: Say, fence: Fence) -> EventLog:
    """The record, which the first rank writes, and the sinks that this rank feeds."""
    sinks = open_sinks(plan, rank=world.rank, local_rank=world.local_rank)
    path = plan.run_dir / "events.jsonl"
    return EventLog(path, enabled=world.is_first, observers=sinks, say=say, fence=fence)
