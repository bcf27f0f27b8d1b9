"""Experts that are dealt out to ranks learn as they do in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import Ranks
from tiny_families import tiny_config
from tiny_runs import (
    Settings,
    Tally,
    Trained,
    assert_close,
    run_steps,
    start,
    train,
    train_plainly,
    whole_params,
)
from torch._dynamo.utils import counters
from transformers import AutoConfig

from shardwise.plan import expert
from shardwise.training.replicas import Replicas
from shardwise.training.session import build_loader
from shardwise.training.step import Stepper

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 301,
    "num_experts_per_tok": 2,
}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **LATENT,
    },
    "glm4_moe": {"n_routed_experts": 8, "first_k_dense_replace": 1},
}
Mesh = tuple[int, Settings]
MESHES: dict[str, Mesh] = {
    "EP 2": (2, {"mesh.shard": 2, "mesh.expert": 2}),
    "EP 4": (4, {"mesh.shard": 4, "mesh.expert": 4}),
    "FSDP 2 x EP 2": (4, {"mesh.shard": 4, "mesh.expert": 2}),
    "HSDP 2 x EP 2": (4, {"mesh.replicate": 2, "mesh.shard": 2, "mesh.expert": 2}),
    "CP 2 x EP 2": (2, {"mesh.context": 2, "mesh.expert": 2}),
    "FSDP 2 x CP 2 x EP 4": (4, {"mesh.shard": 2, "mesh.context": 2, "mesh.expert": 4}),
    "HSDP 2 x CP 2 x EP 2": (4, {"mesh.replicate": 2, "mesh.context": 2, "mesh.expert": 2}),
    "EP 8": (8, {"mesh.shard": 8, "mesh.expert": 8}),
    "FSDP 4 x EP 2": (8, {"mesh.shard": 8, "mesh.expert": 2}),
    "HSDP 2 x FSDP 2 x CP 2 x EP 4": (
        8,
        {"mesh.replicate": 2, "mesh.shard": 2, "mesh.context": 2, "mesh.expert": 4},
    ),
    "HSDP 2 x FSDP 2 x EP 2": (8, {"mesh.replicate": 2, "mesh.shard": 4, "mesh.expert": 2}),
}
HOW: dict[str, Settings] = {
    "plain": {},
    "recomputed": {"memory.checkpoint_activations": "full", "train.accumulation": 2},
    "selective": {"memory.checkpoint_activations": "selective"},
    "kept": {"shard.reshard_after_forward": False, "train.accumulation": 2},
    "experts kept": {"shard.keep_experts": True, "train.accumulation": 2},
    "on the host": {"memory.offload": "cpu"},
    "unfused": {"optim.fused": False},
}
# Each family, mesh and way in the usual suite; all of them together in `make chaos`.
SAMPLE = {
    ("mixtral", "EP 2", "plain"),
    ("mixtral", "EP 2", "unfused"),
    ("mixtral", "FSDP 2 x EP 2", "kept"),
    ("qwen3_moe", "FSDP 2 x EP 2", "experts kept"),
    ("qwen3_moe", "FSDP 2 x EP 2", "recomputed"),
    ("qwen3_moe", "EP 2", "on the host"),
    ("gpt_oss", "HSDP 2 x EP 2", "plain"),
    ("deepseek_v3", "EP 2", "selective"),
    ("mixtral", "CP 2 x EP 2", "recomputed"),
}
GRID = [
    pytest.param(*each, marks=[] if each in SAMPLE else pytest.mark.long)
    for each in product(FAMILIES, MESHES, HOW)
]


@pytest.fixture(scope="module")
def settings_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Settings]:
    """`settings_of(family)`: a run from a made directory of it."""

    @cache
    def make(family: str) -> Settings:
        folder = tmp_path_factory.mktemp(family)
        config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        return {
            "model.name": str(folder),
            "model.overrides": {},
            "model.attention": "eager",
            "train.router_aux_loss": "off",
            "train.seed": 1,
        }

    return make


@pytest.fixture(scope="module")
def plain(ranks: Pools, settings_of: Callable[[str], Settings]) -> Callable[[str], Trained]:
    """`plain(family)`: the run of one process, computed once."""

    @cache
    def run(family: str) -> Trained:
        return ranks(1).run(train_plainly, settings_of(family))[0]

    return run


@pytest.mark.parametrize(("family", "mesh", "how"), GRID)
def test_it_equals_one_process(
    ranks: Pools,
    plain: Callable[[str], Trained],
    settings_of: Callable[[str], Settings],
    tally: Tally,
    family: str,
    mesh: str,
    how: str,
) -> None:
    world, axes = MESHES[mesh]
    settings = {**settings_of(family), **axes, **HOW[how]}
    run = ranks(world).run(train, world, settings)[0]
    assert_close(run, plain(family), tally)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted({*expert.FAMILIES} - {*FAMILIES}))
def test_all_families_that_plans_accept_equal_one_process(
    ranks: Pools, tmp_path: Path, tally: Tally, family: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family).to_dict()))
    place = {"model.name": str(tmp_path), "model.overrides": {}, "model.attention": "eager"}
    settings = {**place, "train.router_aux_loss": "off", "train.seed": 1, "train.steps": 2}
    run = ranks(2).run(train, 2, {**settings, **MESHES["EP 2"][1]})[0]
    assert_close(run, ranks(1).run(train_plainly, settings)[0], tally)


def test_a_rank_whose_experts_no_token_chooses(
    ranks: Pools, settings_of: Callable[[str], Settings]
) -> None:
    """All tokens go to the first two of eight experts: three of four ranks get none."""
    settings = settings_of("mixtral")
    alone = ranks(1).run(train_to_two, 1, settings)[0]
    spread = ranks(4).run(train_to_two, 4, {**settings, **MESHES["EP 4"][1]})[0]
    assert spread.losses == pytest.approx(alone.losses, rel=1e-5)
    assert spread.norms == pytest.approx(alone.norms, rel=1e-5)


def train_to_two(world: int, settings: Settings) -> Trained | None:
    session = start(world, settings)
    with torch.no_grad():
        for name, param in session.model.named_parameters():
            if name.endswith("gate.weight"):
                # Experts with equal scores are chosen in order.
                param.zero_()
    return run_steps(session, range(1))


@pytest.mark.long
def test_every_parameter_changes_in_the_first_step(
    ranks: Pools, settings_of: Callable[[str], Settings]
) -> None:
    settings = {**settings_of("deepseek_v3"), **MESHES["FSDP 2 x EP 2"][1]}
    before, after = ranks(4).run(first_and_second, settings)[0]
    assert any("experts" in name for name in before)
    assert not [name for name in before if (before[name] == after[name]).all()]


def first_and_second(settings: Settings) -> Any:
    session = start(4, settings)
    before = whole_params(session.model)
    after = run_steps(session, range(1))
    return None if after is None else (before, after.params)


@pytest.mark.long
def test_replicas_stay_equal_for_50_steps(
    ranks: Pools, settings_of: Callable[[str], Settings]
) -> None:
    settings = {**settings_of("qwen3_moe"), **MESHES["HSDP 2 x EP 2"][1], "train.steps": 50}
    assert ranks(4).run(fifty_steps, settings) == [50] * 4


def fifty_steps(settings: Settings) -> int:
    """Raises where replicas differ."""
    session = start(4, settings)
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    replicas, loader = (
        Replicas(session.model, session.optimizer, session.mesh),
        build_loader(session),
    )
    for step in range(50):
        stepper.run(loader.step_batches(step), 1e-3)
    replicas.compare(50)
    replicas.settle()
    return stepper.num_run


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full", "selective"])
def test_compiled_blocks_equal_one_process(
    ranks: Pools,
    plain: Callable[[str], Trained],
    settings_of: Callable[[str], Settings],
    remat: str,
) -> None:
    how = {"memory.compile": True, "memory.checkpoint_activations": remat}
    settings = {**settings_of("qwen3_moe"), **MESHES["EP 2"][1], **how}
    run, captured = ranks(2).run(train_compiled, 2, settings)[0]
    assert run.losses == pytest.approx(plain("qwen3_moe").losses, rel=1e-5)
    # Norms outside blocks are a dozen calls. Selective recompute cannot be compiled here.
    assert (captured > 50) is (remat != "selective")


def train_compiled(world: int, settings: Settings) -> Any:
    """The run, and the calls that the compiler has seen."""
    torch._dynamo.reset()
    counters.clear()
    return train(world, settings), counters["stats"]["calls_captured"]
