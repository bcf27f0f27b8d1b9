"""Hugging Face files → shards → checkpoint → export: the same model, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import Ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import Arrays, tiny_plan, whole_params
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.checkpoint.export_model import export_checkpoint
from shardwise.checkpoint.exporter import Exporter
from shardwise.checkpoint.read import find_checkpoint, verify_checkpoint
from shardwise.checkpoint.save import Progress, Saver
from shardwise.model.pretrained import load_pretrained
from shardwise.model.weights import local_part
from shardwise.parallel.mesh import build_mesh
from shardwise.training.optim import build_optimizer
from shardwise.training.session import build_model

pytestmark = pytest.mark.dist
Pool = Callable[[int], Ranks]

# 61 rows divide over neither 2 nor 4 ranks.
COMMON = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, **COMMON},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **COMMON},
    "mistral": {"model_type": "mistral", **COMMON},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, **COMMON},
    "few-experts": {"model_type": "mixtral", "num_local_experts": 2, **COMMON},
    "gemma": {"model_type": "gemma", "head_dim": 8, **COMMON},
    "gpt2": {"model_type": "gpt2", "bos_token_id": 1, "eos_token_id": 2, **GPT2},
}
HSDP = {"shard.strategy": "hybrid_shard", "mesh.replicate": 2, "mesh.shard": 2}


def save_model(
    family: str, directory: Path, dtype: torch.dtype = torch.float32, **how: Any
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():  # norms and biases too: their place must be right
            param.add_(torch.randn_like(param), alpha=0.05)
    model.to(dtype).save_pretrained(directory, **how)


def load_and_save(world: int, model_dir: Path, root: Path, settings: dict[str, Any]) -> str | None:
    """On every rank: the model of `model_dir` in shards, and a checkpoint of it."""
    # So small a model would else be whole on every rank.
    common = {"model.name": str(model_dir), "model.overrides": {}, "shard.strategy": "full_shard"}
    plan = tiny_plan(world, {**common, **settings})
    mesh = build_mesh(plan)
    model, _ = build_model(plan, mesh, lambda text: None)
    saver = Saver(root, plan, model, build_optimizer(model, plan), mesh.world)
    saver.start(Progress(step=0, position=0, tokens=0, loss=None, loss_scale=None))
    (outcome,) = saver.finish()
    saver.close()
    return outcome.error


def round_trip(
    ranks: Pool, source: Path, out: Path, world: int = 2, dtype: Any = None, **settings: Any
) -> None:
    run = out.with_name(f"{out.name}-run")
    errors = ranks(world).run(load_and_save, world, source, run / "checkpoints", settings)
    assert errors == [None] * world
    checkpoint = verify_checkpoint(find_checkpoint(run))
    exporter = Exporter(checkpoint, dtype, lambda num_bytes: None)
    export_checkpoint(exporter, out, layout="safetensors", max_shard_size="4KB")


def logits(directory: Path, dtype: Any = "auto") -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: Tensor = model(input_ids=ids).logits
    return result


def stored(directory: Path) -> dict[str, tuple[list[int], str]]:
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                part = tensors.get_slice(key)
                found[key] = (part.get_shape(), part.get_dtype())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_comes_back_bit_by_bit(family: str, ranks: Pool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(family, source)
    round_trip(ranks, source, out)
    assert torch.equal(logits(out), logits(source))
    # The same names and shapes as save_pretrained's own: tied tensors once, experts one by one.
    assert stored(out) == stored(source)
    ours, theirs = (json.loads((d / "config.json").read_text()) for d in (out, source))
    assert ours == theirs
    assert (out / "generation_config.json").is_file()


@pytest.mark.parametrize(
    ("family", "settings"),
    # Neither 2 nor 4 ranks can share 3 experts out: each has a part of all.
    [("llama-tied", HSDP), ("mixtral", HSDP), ("mixtral", {})],
    ids=["tied-hybrid", "experts-hybrid", "experts-full"],
)
def test_four_ranks_give_it_back(
    family: str, settings: dict[str, Any], ranks: Pool, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(family, source)
    round_trip(ranks, source, out, 4, **settings)
    assert torch.equal(logits(out), logits(source))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bf16_stays_bf16(family: str, ranks: Pool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(family, source, torch.bfloat16)
    round_trip(ranks, source, out, dtype=torch.bfloat16)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert stored(out) == stored(source)
    assert torch.equal(logits(out), logits(source))


def test_the_export_generates(ranks: Pool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model("qwen3", source)
    round_trip(ranks, source, out)
    prompt = torch.tensor([[5, 6, 7]])
    told = [
        AutoModelForCausalLM.from_pretrained(d).generate(
            prompt, max_new_tokens=5, do_sample=False, eos_token_id=None
        )
        for d in (source, out)
    ]
    assert told[0].shape == (1, 8)
    assert torch.equal(told[0], told[1])


@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
def test_a_torch_file_is_read(family: str, ranks: Pool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(family, source)
    expected = logits(source)
    weights = source / "model.safetensors"
    torch.save(load_file(weights), source / "pytorch_model.bin")
    weights.unlink()
    round_trip(ranks, source, out)
    assert torch.equal(logits(out), expected)


@pytest.mark.parametrize("world", [2, 4])
def test_fused_experts_are_read(world: int, ranks: Pool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_model("mixtral", source, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored(source)
    round_trip(ranks, source, out, world)
    assert torch.equal(logits(out), logits(source))


def read_shards(world: int, model_dir: Path) -> tuple[Arrays, int, int]:
    """On every rank: the weights, whole; bytes that it reads, and those that it keeps."""
    common = {"model.name": str(model_dir), "model.overrides": {}, "shard.strategy": "full_shard"}
    plan = tiny_plan(world, {**common, "train.global_batch": 12})
    model, _ = build_model(plan, build_mesh(plan), lambda text: None)
    kept = sum(local_part(param).nbytes for param in model.parameters())
    return whole_params(model), load_pretrained(model, model_dir), kept


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("world", [3, 4])  # of 3 ranks one has rows of both gate and up
def test_a_rank_reads_its_part_of_the_experts_alone(
    world: int, fused: bool, ranks: Pool, tmp_path: Path
) -> None:
    save_model("few-experts", tmp_path, save_original_format=not fused)
    expected = whole_params(AutoModelForCausalLM.from_pretrained(tmp_path))
    for found, read, kept in ranks(world).run(read_shards, world, tmp_path):
        assert read == kept
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_weights_without_the_models_prefix_are_read(ranks: Pool, tmp_path: Path) -> None:
    """As the hub holds GPT-2."""
    source, out = tmp_path / "source", tmp_path / "out"
    save_model("gpt2", source)
    expected = logits(source)
    weights = source / "model.safetensors"
    bare = {key.removeprefix("transformer."): value for key, value in load_file(weights).items()}
    save_file(bare, weights, metadata={"format": "pt"})
    round_trip(ranks, source, out)
    assert torch.equal(logits(out), expected)
