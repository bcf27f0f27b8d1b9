"""Which sinks a rank feeds, as `observe` says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Literal

from shardwise.metrics.events import read_whole_events
from shardwise.metrics.sinks.feed import Feed, Sink
from shardwise.plan.planned import Plan


def open_sinks(plan: Plan, *, rank: int, local_rank: int) -> list[Feed]:
    """Rank 0 feeds all that are asked for; the first rank of each other node its own endpoint."""
    feeds = list(_run_feeds(plan)) if rank == 0 else []
    if local_rank == 0 and plan.settings.observe.prometheus_port is not None:
        feeds.append(_prometheus_feed(plan, rank))
    return feeds


def _run_feeds(plan: Plan) -> Iterator[Feed]:
    observe = plan.settings.observe
    if observe.tensorboard:
        yield Feed("tensorboard", lambda: _open_tensorboard(plan))
    if observe.wandb != "off":
        mode = observe.wandb
        yield Feed("wandb", lambda: _open_wandb(plan, mode))


def _open_tensorboard(plan: Plan) -> Sink:
    from shardwise.metrics.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(plan.run_dir / "tensorboard")


def _open_wandb(plan: Plan, mode: Literal["offline", "online"]) -> Sink:
    from shardwise.metrics.sinks.wandb import WandbSink

    config = {**asdict(plan.settings), "cluster": plan.cluster.name, "plan": asdict(plan.decided)}
    project = plan.settings.observe.wandb_project
    return WandbSink(plan.run_dir, mode=mode, project=project, config=config)


def _prometheus_feed(plan: Plan, rank: int) -> Feed:
    observe, record = plan.settings.observe, plan.run_dir / "events.jsonl"
    # Measured now: what is written from here on comes through the feed.
    known = record.stat().st_size if rank == 0 and record.exists() else 0

    def open_sink() -> Sink:
        from shardwise.metrics.sinks.exposition import Told
        from shardwise.metrics.sinks.prometheus import PrometheusSink

        told = Told(plan.run_dir.name, rank, observe.log_every, plan.settings.checkpoint.every)
        history = read_whole_events(record, end=known) if known else []
        return PrometheusSink(told, observe.prometheus_host, observe.prometheus_port or 0, history)

    return Feed("prometheus", open_sink)
