"""All ranks come to the same verdict on the loss, whichever of them computes another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from rank_pool import Ranks
from tiny_runs import SHAPE, Settings, start

from shardwise.errors import UserError
from shardwise.metrics.events import EventLog
from shardwise.parallel.expert_pass import apply_experts
from shardwise.training.channels import Channels
from shardwise.training.comparison import compare_losses
from shardwise.training.heartbeat import Heartbeat
from shardwise.training.session import Session
from shardwise.training.signals import StopRequest

pytestmark = pytest.mark.dist


def verdict(settings: Settings, wrong_rank: int | None) -> str:
    """What this rank is told."""
    session = start(2, settings)
    if dist.get_rank() == wrong_rank:
        sum_loss = session.model.sum_loss
        session.model.sum_loss = lambda *args: 1.1 * sum_loss(*args)
    return told(session)


def told(session: Session) -> str:
    said: list[str] = []
    events = EventLog(Path("events.jsonl"), enabled=False)
    channels = Channels(events, said.append, StopRequest(), Heartbeat(0))
    try:
        compare_losses(session, channels, 0)
    except UserError as error:
        return f"{error.code}: {error}"
    return said[0]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_ranks_that_agree_with_the_model_train(
    ranks: Callable[[int], Ranks], strategy: str
) -> None:
    first, second = ranks(2).run(verdict, {"shard.strategy": strategy}, None)
    assert first == second
    assert first.startswith("loss check: ")


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_one_rank_that_does_not_stops_all(ranks: Callable[[int], Ranks], wrong_rank: int) -> None:
    first, second = ranks(2).run(verdict, {}, wrong_rank)
    assert first == second
    assert first.startswith("2: the loss here is 6.")


def verdict_on_experts(settings: Settings, factor: float) -> str:
    """The verdict on experts in our own pass, whose results are multiplied there alone."""
    session = start(2, settings)
    layers = list(session.model.model.layers)
    apply_experts(layers)
    grouped = type(layers[0].mlp.experts)
    assert grouped.__name__.startswith("Grouped")
    forward = grouped.forward
    grouped.forward = lambda *given: factor * forward(*given)
    return told(session)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "loss check: "), (2.0, "2: the loss here")])
def test_clamped_experts_are_compared_with_the_family_s_own_loop(
    ranks: Callable[[int], Ranks], tmp_path: Path, factor: float, expected: str
) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    config = {**SHAPE, **sizes, "model_type": "gpt_oss", "head_dim": 8, "initializer_range": 0.2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings: Settings = {
        "model.name": str(tmp_path),
        "model.overrides": {},
        "precision.param": "bf16",
    }
    first, second = ranks(2).run(verdict_on_experts, settings, factor)
    assert first == second
    assert first.startswith(expected)


@pytest.mark.torchao
def test_float8_layers_are_compared_with_torchao_s_own(ranks: Callable[[int], Ranks]) -> None:
    settings: Settings = {
        "cluster.name": "2xH200",
        "model.overrides": {**SHAPE, "intermediate_size": 64},
        "precision.linear": "float8",
        "precision.param": "bf16",
        "precision.float8_min_features": 16,
    }
    first, second = ranks(2).run(verdict, settings, None)
    assert first == second
    assert first.startswith("loss check: ")
