"""Experts in float8 on ranks: near the plain path, and the same however experts are spread."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import Ranks
from tiny_families import save_model, tiny_config
from tiny_runs import Settings, Trained, train
from transformers import AutoModelForCausalLM

from commands import run_forked

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
MESHES: dict[str, tuple[int, Settings]] = {
    "one": (1, {}),
    "FSDP 2": (2, {"mesh.shard": 2, "memory.checkpoint_activations": "selective"}),
    "EP 2": (2, {"mesh.shard": 2, "mesh.expert": 2, "memory.checkpoint_activations": "full"}),
    "FSDP 2 x EP 2": (4, {"mesh.shard": 4, "mesh.expert": 2}),
    "HSDP 2 x EP 2": (4, {"mesh.replicate": 2, "mesh.shard": 2, "mesh.expert": 2}),
}
USUAL = [("mixtral", "FSDP 2"), ("mixtral", "EP 2"), ("gpt_oss", "EP 2")]
GRID = [
    pytest.param(family, mesh, marks=[] if (family, mesh) in USUAL else pytest.mark.long)
    for family in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
    for mesh in MESHES
    if mesh != "one"
]


@pytest.fixture(scope="module")
def trained(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """`trained(family, mesh, experts)`: a run of a made directory, computed once."""

    @cache
    def place_of(family: str) -> Path:
        place = tmp_path_factory.mktemp(family)
        save_model(tiny_config(family), place)
        return place

    @cache
    def run(family: str, mesh: str, experts: str) -> Trained:
        world, axes = MESHES[mesh]
        settings: dict[str, Any] = {
            "model.name": str(place_of(family)),
            "model.overrides": {},
            "model.attention": "eager",
            "train.router_aux_loss": "off",
            # As in tests/dist/test_families.py: what is nothing but rounding must be no step.
            "optim.eps": 1e-4,
            "precision.experts": experts,
            **axes,
        }
        found: Trained = ranks(world).run(train, world, settings)[0]
        return found

    return run


@pytest.mark.parametrize(("family", "mesh"), GRID)
def test_every_mesh_gives_the_numbers_of_one_process(
    trained: Callable[..., Trained], family: str, mesh: str
) -> None:
    alone, spread = trained(family, "one", "float8"), trained(family, mesh, "float8")
    assert spread.losses == pytest.approx(alone.losses, rel=1e-5)
    # A number beside the middle of two codes falls to the other one by the order of a sum.
    assert spread.norms == pytest.approx(alone.norms, rel=1e-3)
    exact = trained(family, "one", "param")
    assert alone.losses != exact.losses
    assert alone.losses == pytest.approx(exact.losses, rel=2e-3)
    assert alone.norms == pytest.approx(exact.norms, rel=5e-2)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mixtral", ("mesh.expert=2", "shard.strategy=full_shard")),
        pytest.param("qwen3_moe", (), marks=pytest.mark.long),
    ],
)
def test_the_command_trains_and_exports_float8_experts(
    family: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    save_model(tiny_config(family), tmp_path / "model")
    file = tmp_path / "run.yaml"
    file.write_text("cluster: 2xCPU\ndata: {source: synthetic, seq_len: 16}\n")
    words = (f"model.name={tmp_path / 'model'}", f"runs_dir={tmp_path}", "name=run")
    batch = ("train.global_batch=4", "train.steps=2", "precision.experts=float8")
    run_forked(tmp_path, "train", file, *words, *batch, *more)
    run_forked(tmp_path, "export", tmp_path / "run", "--to", tmp_path / "out")
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / place, dtype=torch.float32).state_dict()
        for place in ("out", "model")
    )
    assert ours.keys() == theirs.keys()
    assert all(tensor.dtype == torch.float32 for tensor in ours.values())
    (stack, *_) = (name for name in ours if name.endswith("gate_up_proj"))
    assert not torch.equal(ours[stack], theirs[stack])
