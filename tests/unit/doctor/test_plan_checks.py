"""Each check of a plan fires on its fault, and all are quiet on healthy plans."""

from __future__ import annotations

import pytest
from healthy import healthy_plans, plan_of

from shardwise.doctor.check import find_faults
from shardwise.doctor.registry import PLAN_CHECKS
from shardwise.plan.planned import Plan

EIGHT = ("model=llama-3.1-8b", "cluster=8xH100")
NODES = ("model=llama-3.1-8b", "cluster=4x8xH100")
FAULTS = {
    "SW101": (*EIGHT, "shard.unit_min_params=1000000000"),
    "SW102": (*EIGHT, "shard.unit_min_params=1000000"),
    "SW103": ("model=mixtral-8x7b", "cluster=8xRTX-4090", "memory.offload=cpu", "mesh.expert=1",
              "train.micro_batch=1", "data.seq_len=512"),
    "SW104": (*NODES, "shard.strategy=full_shard", "cluster.interconnect=ethernet-25",
              "train.micro_batch=1"),
    "SW105": (*NODES, "mesh.shard=16", "mesh.replicate=2"),
    "SW106": (*EIGHT, "shard.all_gather_limit=1"),
    "SW107": ("model=llama-3.1-8b", "cluster=8xL40S", "adapter=none", "train.micro_batch=1",
              "data.seq_len=256", "memory.checkpoint_activations=full"),
    "SW108": ("model=llama-3.1-405b", "cluster=128x8xH100", "shard.strategy=full_shard"),
    "SW109": ("model=llama-3.1-8b", "cluster=8xL40S", "mesh.tensor=2"),
    "SW110": ("model=qwen3-30b-a3b", "cluster=4x8xH200", "cluster.interconnect=ethernet-25",
              "mesh.expert=32"),
    "SW111": ("model=gemma-3-4b", "cluster=8xH200", "mesh.context=8", "data.seq_len=8192"),
    "SW120": (*EIGHT, "precision.reduce=bf16"),
    "SW121": (*EIGHT, "precision.param=fp16"),
    "SW122": ("model=llama-3.2-1b", "cluster=8xV100-32GB", "precision.param=bf16"),
    "SW123": ("model=llama-3.1-8b", "cluster=1xH100", "memory.offload=cpu", "optim.fused=false"),
    "SW124": ("model=llama-3.1-8b", "cluster=1xH100", "memory.offload=cpu",
              "memory.pin_memory=false"),
    "SW125": ("model=llama-3.2-1b", "cluster=8xH100", "memory.offload=cpu", "train.micro_batch=1"),
    "SW126": ("model=llama-3.2-1b", "cluster=8xH100", "memory.checkpoint_activations=full",
              "train.micro_batch=4"),
    "SW127": ("model=gemma-3-4b", "cluster=8xH100", "memory.loss=full", "train.micro_batch=1",
              "data.seq_len=8192"),
    "SW128": (*EIGHT, "optim.clip_norm=null"),
    "SW129": ("model=llama-3.1-70b", "cluster=4x8xH100", "checkpoint.every=0", "train.steps=90000"),
    "SW130": ("model=tiny-llama", "cluster=1xCPU", "observe.memory_history=true"),
}  # fmt: skip


def found_in(plan: Plan) -> dict[str, str]:
    return {finding.check.id: finding.evidence for finding in find_faults(PLAN_CHECKS, plan)}


@pytest.mark.parametrize("name", [check.id for check in PLAN_CHECKS])
def test_a_fault_is_found(name: str) -> None:
    found = found_in(plan_of(*FAULTS[name]))
    assert name in found, found
    assert found[name]


def test_healthy_plans_are_quiet() -> None:
    plans = healthy_plans()
    assert len(plans) >= 20
    found = {(p.model.name, p.cluster.name): found_in(p) for p in plans}
    # That an axis has not run on several GPUs yet is said of every plan with one.
    known = "has not run on several yet"
    assert not {place: f for place, f in found.items() if any(known not in s for s in f.values())}
