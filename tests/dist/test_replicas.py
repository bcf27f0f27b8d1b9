"""Replicas are compared bit by bit, and a difference ends the run before it is saved."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks
from tiny_runs import Settings, run_steps, start, tiny_plan

from shardwise.checkpoint.store import list_checkpoints
from shardwise.errors import ExitCode, UserError
from shardwise.training import loop, rank_run
from shardwise.training.replicas import Replicas

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
COPIES: Settings = {"shard.strategy": "no_shard"}
FULL: Settings = {"shard.strategy": "full_shard"}
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def flip_one_bit(model: Any, rank: int, bit: int = 0) -> None:
    """Of one number that this rank holds of `WEIGHT`, where it is this rank."""
    if dist.get_rank() == rank:
        local = dict(model.named_parameters())[WEIGHT].to_local()
        local.view(torch.int32).view(-1)[5] ^= 1 << bit


def compare(world: int, settings: Settings, bad_rank: int | None) -> str | None:
    """Train two steps, change a bit on one rank, compare."""
    session = start(world, settings)
    replicas = Replicas(session.model, session.optimizer, session.mesh)
    run_steps(session, range(2))
    replicas.compare(2)
    replicas.settle()
    if bad_rank is not None:
        flip_one_bit(session.model, bad_rank)
    replicas.compare(2)
    try:
        replicas.settle()
    except UserError as error:
        assert error.code == ExitCode.ENVIRONMENT
        return str(error)
    return None


@pytest.mark.parametrize("more", [{}, {"memory.offload": "cpu"}, {"optim.state": "bf16"}], ids=str)
def test_a_bit_is_named_by_tensor_ranks_and_hosts(ranks: Pools, more: Settings) -> None:
    """On all four ranks, also on those that hold the other shard."""
    host = socket.gethostname()
    for said in ranks(4).run(compare, 4, {**HYBRID, **more}, 3):
        assert said is not None
        assert f"after step 2: rank 3 on {host} holds other bits of {WEIGHT} than" in said
        assert f"than rank 1 on {host}\n" in said


def test_the_odd_one_of_three_is_named(ranks: Pools) -> None:
    for said in ranks(4).run(compare, 4, COPIES, 0):
        assert said is not None and ": rank 0 on" in said and "than rank 1 on" in said


@pytest.mark.parametrize(("world", "settings"), [(2, FULL), (1, FULL)], ids=["two", "one"])
def test_without_replicas_there_is_nothing_to_compare(
    ranks: Pools, world: int, settings: Settings
) -> None:
    assert ranks(world).run(compare, world, settings, 0) == [None] * world


def drift_apart(world: int, settings: Settings, at: int) -> tuple[int, str]:
    """A whole run, in which one bit changes on rank 1 before batch `at`."""
    built: list[Any] = []
    seed_step, build = loop.seed_step, rank_run.build_session

    def build_and_note(*args: Any, **named: Any) -> Any:
        built.append(build(*args, **named))
        return built[0]

    def seed_and_flip(seed: int, position: int, data_rank: int) -> None:
        if position == at:
            # Rounding would soon make the lowest ones equal again.
            flip_one_bit(built[0].model, 1, bit=16)
        seed_step(seed, position, data_rank)

    with (
        mock.patch.object(rank_run, "build_session", build_and_note),
        mock.patch.object(loop, "seed_step", seed_and_flip),
    ):
        try:
            rank_run.run(tiny_plan(world, settings), lambda text: None)
        except UserError as error:
            return int(error.code), str(error)
    return 0, ""


@pytest.mark.parametrize(
    ("every", "at", "after"), [(0, 5, 8), (2, 5, 6), (0, 0, 4)], ids=["save", "edge", "first"]
)
def test_a_run_ends_before_it_saves_a_mixture(
    ranks: Pools, tmp_path: Path, every: int, at: int, after: int
) -> None:
    """`after`: the step at whose end the difference is found."""
    settings = {
        **COPIES,
        **{"runs_dir": str(tmp_path), "train.steps": 10, "checkpoint.every": 4, "optim.lr": 1e-4},
        **{"train.compare_replicas_every": every},
    }
    (tmp_path / "run").mkdir()
    for code, said in ranks(2).run(drift_apart, 2, settings, at):
        assert code == ExitCode.ENVIRONMENT, said
        assert f"replicas differ after step {after}: rank 1 on" in said
    saved = [found.step for found in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert saved == [step for step in (4,) if step < after]


def start_with_other_weights(world: int, settings: Settings) -> tuple[int, str]:
    """As drift_apart, with weights that differ from the first."""
    fill = rank_run.build_session

    def build_and_change(*args: Any, **named: Any) -> Any:
        session = fill(*args, **named)
        flip_one_bit(session.model, 1)
        return session

    with mock.patch.object(rank_run, "build_session", build_and_change):
        return drift_apart(world, settings, -1)


def test_first_weights_are_compared(ranks: Pools, tmp_path: Path) -> None:
    settings = {**COPIES, "runs_dir": str(tmp_path)}
    (tmp_path / "run").mkdir()
    for code, said in ranks(2).run(start_with_other_weights, 2, settings):
        assert code == ExitCode.ENVIRONMENT and "replicas differ after step 0" in said, said
