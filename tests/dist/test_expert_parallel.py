"""Experts that are dealt out to ranks learn as they do in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
from rank_pool import Ranks
from tiny_runs import Settings, Tally, Trained, assert_close, train, train_plainly
from transformers import AutoConfig

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
    "EP 8": (8, {"mesh.shard": 8, "mesh.expert": 8}),
    "FSDP 4 x EP 2": (8, {"mesh.shard": 8, "mesh.expert": 2}),
    "HSDP 2 x FSDP 2 x EP 2": (8, {"mesh.replicate": 2, "mesh.shard": 4, "mesh.expert": 2}),
}
HOW: dict[str, Settings] = {
    "plain": {},
    "recomputed": {"memory.checkpoint_activations": "full", "train.accumulation": 2},
    "selective": {"memory.checkpoint_activations": "selective"},
    "kept": {"shard.reshard_after_forward": False, "train.accumulation": 2},
    "on the host": {"memory.offload": "cpu"},
}
# Each family, mesh and way in the usual suite; all of them together in `make chaos`.
SAMPLE = {
    ("mixtral", "EP 2", "plain"),
    ("mixtral", "FSDP 2 x EP 2", "kept"),
    ("qwen3_moe", "FSDP 2 x EP 2", "recomputed"),
    ("qwen3_moe", "EP 2", "on the host"),
    ("gpt_oss", "HSDP 2 x EP 2", "plain"),
    ("deepseek_v3", "EP 4", "selective"),
    ("glm4_moe", "EP 2", "recomputed"),
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
