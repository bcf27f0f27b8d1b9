"""Who calls the collectives of a model: FSDP2 itself, unless something has to come between."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config.load import load_config
from shardwise.internals.parts import PUBLIC_ONLY
from shardwise.launch.prepare import choose_plan
from shardwise.parallel.apply import parallelize
from shardwise.parallel.comm import Carrier, apply_carrier
from shardwise.parallel.mesh import build_mesh
from shardwise.plan.planned import Plan
from shardwise.tunnel.world import rank_zero_of

CONFIG = "model: tiny-llama\ndata: synthetic\nshard: {strategy: full_shard}\n"
HOOKS = ("set_custom_all_gather", "set_custom_reduce_scatter")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a unit was given hooks for its collectives."""
    found: Counter[str] = Counter()
    for name in HOOKS:
        real = getattr(FSDPModule, name)

        def note(module: Any, comm: Any, name: str = name, real: Any = real) -> None:
            found[name] += 1
            real(module, comm)

        monkeypatch.setattr(FSDPModule, name, note)
    return found


def plan_of(folder: Path, *words: str) -> Plan:
    (folder / "run.yaml").write_text(CONFIG)
    return choose_plan(load_config(str(folder / "run.yaml"), [*words]), {})


def shard(plan: Plan, carrier: Carrier | None = None) -> int:
    """How many hooks of a kind a carrier has: one for each unit, and one for the root."""
    with rank_zero_of(plan.world_size):
        units = parallelize(model_of(plan), plan, carrier=carrier)
    return len(units.units) + 1


def model_of(plan: Plan) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**plan.hf_config))


def test_fsdp2_calls_its_own_where_nothing_is_needed(tmp_path: Path, told: Counter[str]) -> None:
    shard(plan_of(tmp_path, "cluster=4xCPU"))
    assert not told


@pytest.mark.parametrize("in_place", ["true", "false"])
def test_a_carrier_is_installed_once(tmp_path: Path, told: Counter[str], in_place: str) -> None:
    plan = plan_of(tmp_path, "cluster=4xCPU", f"shard.gather_in_place={in_place}")
    num_hooks = shard(plan, Carrier())
    assert told == dict.fromkeys(HOOKS, num_hooks)


def test_gathers_in_place_need_one(tmp_path: Path, told: Counter[str]) -> None:
    plan = plan_of(tmp_path, "cluster=4xCPU", "shard.gather_in_place=true")
    num_hooks = shard(plan)
    assert told == dict.fromkeys(HOOKS, num_hooks)


def test_gpus_need_one_for_the_memory_of_reductions(tmp_path: Path, told: Counter[str]) -> None:
    plan = plan_of(tmp_path, "cluster=4xCPU")
    on_gpus = replace(plan, cluster=replace(plan.cluster, device="cuda"))
    with rank_zero_of(4):
        model = model_of(plan)
        units = parallelize(model, plan)
        apply_carrier(model, units, on_gpus, build_mesh(plan), None)
    assert told == dict.fromkeys(HOOKS, len(units.units) + 1)


@pytest.mark.parametrize("words", [["cluster=1xCPU"], ["cluster=4xCPU"]])
def test_the_switch_leaves_all_to_fsdp2(
    tmp_path: Path, told: Counter[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv(PUBLIC_ONLY, "1")
    shard(plan_of(tmp_path, *words, "shard.gather_in_place=true"))
    assert not told
