"""The plan of a run whose ranks share work, beside the bytes of rank 0's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwise.plan.memory import estimate_memory
from shardwise.plan.planned import Plan
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.fake import run_fake
from shardwise.units import GIB

MakePlan = Callable[..., Plan]
# Fake tensors run without the compiler, our kernels, and the buffer that reductions share on a GPU.
COMMON = (
    *("memory.compile=false", "train.kernels=torch", "shard.gather_in_place=false"),
    *("mesh.replicate=1", "train.micro_batch=1"),
)
FOUR_K, LONG = "data.seq_len=4096", ("data.seq_len=131072", "mesh.context=8")
LLAMA = "model={name: llama-3.1-8b, overrides: {num_hidden_layers: 2}}"
MIXTURE = "model={name: mixtral-8x7b, overrides: {num_hidden_layers: 2}}"
CUT = {
    "TP 2": (LLAMA, "cluster.name=2x8xH100", FOUR_K, "mesh.tensor=2"),
    "TP 8": (LLAMA, "cluster.name=2x8xH100", FOUR_K, "mesh.tensor=8"),
    "CP 8": (LLAMA, "cluster.name=8xH100", *LONG),
    "EP 8": (MIXTURE, "cluster.name=2x8xH100", FOUR_K, "mesh.expert=8"),
    "EP 8, experts kept": (
        *(MIXTURE, "cluster.name=2x8xH100", FOUR_K),
        *("mesh.expert=8", "shard.keep_experts=true"),
    ),
}
CASES = [
    pytest.param("TP 2", "none", marks=pytest.mark.long),
    pytest.param("TP 8", "full", marks=pytest.mark.long),
    ("TP 8", "selective"),
    ("CP 8", "none"),
    ("EP 8", "none"),
    ("EP 8, experts kept", "full"),
]
EIGHT_K = "data.seq_len=8192"
WHOLE = {
    "70B, TP 2": ("model=llama-3.1-70b", "cluster.name=4x8xH100", FOUR_K, "mesh.tensor=2"),
    "70B, TP 8": ("model=llama-3.1-70b", "cluster.name=4x8xH100", EIGHT_K, "mesh.tensor=8"),
    "405B, TP 8, CP 2": (
        *("model=llama-3.1-405b", "cluster.name=64x8xH100", EIGHT_K),
        *("mesh.tensor=8", "mesh.context=2"),
    ),
    "235B, EP 8": ("model=qwen3-235b-a22b", "cluster.name=8x8xH100", FOUR_K, "mesh.expert=8"),
    "DeepSeek-V3, EP 32": (
        *("model=deepseek-v3", "cluster.name=32x8xH100", FOUR_K, "mesh.expert=32"),
    ),
    "8B, CP 8": ("model=llama-3.1-8b", "cluster.name=8xH100", *LONG),
}


@pytest.mark.parametrize(("name", "recompute"), CASES)
def test_planned_bytes_are_those_of_tensors(plan_of: MakePlan, name: str, recompute: str) -> None:
    assert_as_planned(plan_of(*CUT[name], f"memory.checkpoint_activations={recompute}", *COMMON))


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE)
def test_planned_bytes_of_whole_models(plan_of: MakePlan, name: str) -> None:
    """With the recompute that the planner chooses."""
    assert_as_planned(plan_of("model.overrides={}", *WHOLE[name], *COMMON))


def assert_as_planned(plan: Plan) -> None:
    found = run_fake(plan, Links.of(plan.cluster.fabric))
    alike = replace(plan.cluster, device="cpu")
    memory, held = estimate_memory(plan.model, alike, plan.decided), found.memory
    print(
        f"{plan.decided.checkpoint_activations}: {memory.allocated / GIB:.2f} GiB planned, "
        f"{held.allocated_bytes / GIB:.2f} of tensors"
    )
    assert held.classes["params"] == pytest.approx(memory.params, rel=0.01)
    assert held.largest["optimizer"] == pytest.approx(memory.optimizer, rel=0.01)
    assert memory.allocated == pytest.approx(held.allocated_bytes, rel=0.05)
    ranks = {each.ranks for each in found.collectives}
    decided = plan.decided
    sizes = {decided.tensor, decided.context, decided.expert, decided.shard * decided.context}
    assert sizes - {1} <= ranks
