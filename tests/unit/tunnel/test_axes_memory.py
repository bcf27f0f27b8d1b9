"""The plan of a run whose ranks share work, beside the bytes of rank 0's tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.plan.plan import Plan
from shardwise.tunnel.fake import run_fake
from shardwise.tunnel.links import Links

# Fake tensors run without the compiler and our kernels.
COMMON = (
    *("memory.compile=false", "train.kernels=torch", "shard.gather_in_place=false"),
    *("mesh.replicate=1", "train.micro_batch=1"),
)


@pytest.mark.parametrize(
    "words",
    [
        ("mesh.tensor=2", "memory.checkpoint_activations=none"),
        ("mesh.tensor=8", "memory.checkpoint_activations=full"),
    ],
)
def test_planned_bytes_are_those_of_tensors(
    plan_of: Callable[..., Plan], words: tuple[str, ...]
) -> None:
    model = "model={name: llama-3.1-8b, overrides: {num_hidden_layers: 2}}"
    plan = plan_of(model, "cluster.name=2x8xH100", "data.seq_len=4096", *words, *COMMON)
    found = run_fake(plan, Links.of(plan.cluster.fabric))
    memory = plan.memory
    assert found.memory.classes["params"] == pytest.approx(memory.params, rel=0.01)
    assert found.memory.largest["optimizer"] == pytest.approx(memory.optimizer, rel=0.01)
    assert memory.allocated == pytest.approx(found.memory.allocated_bytes, rel=0.05)
    ranks = {each.ranks for each in found.collectives}
    assert plan.decided.tensor in ranks and plan.decided.shard in ranks
