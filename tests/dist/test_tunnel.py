"""The tunnel says what real ranks do: the same collectives in the same order, the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import Ranks
from tiny_runs import Settings, start, tiny_plan
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.training.session import build_loader
from shardwise.training.step import Stepper
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.fake import run_fake
from shardwise.tunnel.ledger import held_bytes
from shardwise.tunnel.result import TunnelResult

pytestmark = pytest.mark.dist

Sequence = list[tuple[str, int]]

FULL: Settings = {"shard.strategy": "full_shard"}
HYBRID: Settings = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2}
PLAIN: Settings = {"shard.strategy": "no_shard"}
FLOAT8: Settings = {
    "cluster.name": "2xH200",
    "precision.linear": "float8",
    "precision.float8_min_features": 16,
}
# What moves, and which argument is the whole of it.
OPERATORS = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
}


class Recorder(TorchDispatchMode):
    """The collectives of real ranks, read where torch dispatches them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Sequence = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        name = func.name().split(".")[0]
        if name in OPERATORS:
            kind, index = OPERATORS[name]
            moved = [args[index]] if isinstance(args[index], torch.Tensor) else args[index]
            self.seen.append((kind, sum(each.nbytes for each in moved)))
        return func(*args, **(kwargs or {}))


def measure(world: int, settings: Settings) -> tuple[Sequence, dict[str, int]]:
    """On every rank: the collectives of the second step, and the states that it holds then."""
    session = start(world, settings)
    loader = build_loader(session)
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    stepper.run(loader.step_batches(0), 1e-3)
    with Recorder() as recorder:
        stepper.run(loader.step_batches(1), 1e-3)
    moments = [value for state in session.optimizer.state.values() for value in state.values()]
    states = {
        "params": held_bytes(session.model.parameters(), "cpu"),
        "optimizer": held_bytes(moments, "cpu"),
    }
    return recorder.seen, states


def in_tunnel(world: int, settings: Settings) -> TunnelResult:
    plan = tiny_plan(world, settings)
    return run_fake(plan, Links.of(plan.cluster.fabric))


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        pytest.param(2, FULL, id="full_shard"),
        pytest.param(
            2, {"shard.strategy": "shard_grad_op"}, id="shard_grad_op", marks=pytest.mark.long
        ),
        pytest.param(2, PLAIN, id="no_shard", marks=pytest.mark.long),
        pytest.param(4, HYBRID, id="hybrid_shard"),
        pytest.param(
            2,
            {**FULL, "train.accumulation": 4, "memory.accumulate": "unsharded"},
            id="accumulated whole",
            marks=pytest.mark.long,
        ),
        pytest.param(
            4,
            {**HYBRID, "train.accumulation": 4, "memory.accumulate": "sharded"},
            id="accumulated in shards",
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            {**FULL, "memory.checkpoint_activations": "full"},
            id="recomputed",
            marks=pytest.mark.long,
        ),
        pytest.param(4, {**FULL, "shard.reshard_after_forward": 2}, id="resharded to pairs"),
        pytest.param(
            2, {**FULL, "optim.clip_norm": None}, id="not clipped", marks=pytest.mark.long
        ),
        pytest.param(2, {**FULL, "precision.param": "bf16"}, id="bf16", marks=pytest.mark.long),
        pytest.param(2, {**FULL, "memory.offload": "cpu"}, id="offloaded"),
        pytest.param(2, {**FULL, "memory.loss": "full"}, id="all logits", marks=pytest.mark.long),
        pytest.param(2, {**FULL, "shard.gather_in_place": True}, id="gathered in place"),
        pytest.param(2, {**FULL, **FLOAT8}, id="float8", marks=pytest.mark.torchao),
    ],
)
def test_tunnel_lists_what_real_ranks_issue(
    ranks: Callable[[int], Ranks], world: int, settings: Settings
) -> None:
    sequence, states = ranks(world).run(measure, world, settings)[0]
    result = in_tunnel(world, settings)
    assert [(item.kind, item.num_bytes) for item in result.collectives] == sequence
    if "memory.offload" not in settings:
        largest = result.memory.largest
        assert {name: largest[name] for name in states} == states
        assert largest["grads"] == states["params"]
