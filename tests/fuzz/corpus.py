"""Sound inputs of every kind, made here: what the cases then change."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from shardwise.checkpoint.durable_files import write_file
from shardwise.checkpoint.index import Piece, StoredTensor, dump_index
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.store import begin, publish
from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "report"))
from sample_runs import SampleRun

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 1,
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 320, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 128},
    "opt": {
        **{"vocab_size": 320, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2},
        **{"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 128},
    },
    "mixtral": {
        **{"vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "sliding_window": None},
    },
}
RUN: dict[str, Any] = {
    "name": "run",
    "model": {"name": "tiny-llama", "weights": "auto", "overrides": {"num_hidden_layers": 2}},
    "data": {"source": "jsonl", "path": "data.jsonl", "field": "text", "seq_len": 32},
    "cluster": {"name": "2xCPU"},
    "mesh": {"replicate": 1, "shard": 2},
    "shard": {"strategy": "full_shard", "reshard_after_forward": True},
    "precision": {"param": "fp32", "reduce": "fp32"},
    "memory": {"checkpoint_activations": "none", "loss": "auto"},
    "optim": {"lr": 1e-3, "betas": [0.9, 0.95], "schedule": "cosine", "warmup_steps": 2},
    "train": {"steps": 8, "global_batch": 8, "seed": 0},
    "checkpoint": {"every": 4, "keep": 2},
    "gates": {"enforce": False},
    "observe": {"log_every": 1},
}
STEPS = (2, 4, 6)


def build_corpus(home: Path) -> None:
    """Models, data and a run below `home`, under the names that the cases use."""
    (home / "data.jsonl").write_text(
        "".join(json.dumps({"id": n, "text": f"{n} and {n} make {2 * n}. " * 4}) + "\n"
                for n in range(20))
    )  # fmt: skip
    model = _build_model(home / "model")
    _shard(home / "sharded", model)
    _save_tokenizer(home / "model")
    _save_tokenizer(home / "sharded")
    for name, fields in OTHERS.items():
        folder = home / "others" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": name, **fields}))
    _save_datasets(home)
    _make_run(home, model)


def write_run(folder: Path, tree: dict[str, Any] = RUN) -> None:
    (folder / "run.json").write_text(json.dumps(tree))


def _build_model(folder: Path) -> Any:
    torch.manual_seed(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE, indent=1))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE))
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    return model


def _shard(folder: Path, model: Any) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    state = model.state_dict()
    names = {key: f"model-{n % 2}.safetensors" for n, key in enumerate(state)}
    for file in sorted(set(names.values())):
        save_file({key: state[key] for key in state if names[key] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _save_tokenizer(folder: Path) -> None:
    words = ["<unk>", "</s>", "and", "make", *map(str, range(280))]
    vocab = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(folder)


def _save_datasets(home: Path) -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"text": ["one and one make two"] * 20, "id": list(range(20))})
    rows.save_to_disk(home / "saved")
    (home / "parquet").mkdir()
    rows.to_parquet(home / "parquet" / "train.parquet")


def _make_run(home: Path, model: Any) -> None:
    """A finished run of `model` with three checkpoints, as training leaves it."""
    file = home / "whole.yaml"
    file.write_text(json.dumps({**RUN, "model": {"name": str(home / "model")}, "mesh": {}}))
    words = [f"runs_dir={home / 'runs'}", f"data.path={home / 'data.jsonl'}", "cluster.name=1xCPU"]
    plan = choose_plan(load_config(file, words), {})
    run = SampleRun(plan)
    run.start(0)
    run.train(1, 8, every=1, save=2)
    run.say("gates", gates=[])
    run.say("end", step=8)
    run.write()
    for step in STEPS:
        _save_checkpoint(plan, model, step)


def _save_checkpoint(plan: Plan, model: Any, step: int) -> None:
    root = plan.run_dir / "checkpoints"
    shard, data, index = "rank-00000.bin", b"", {}
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        piece = Piece((0,) * len(shape), shape, shard, len(data))
        index[f"model.{name}"] = StoredTensor(torch.float32, shape, (piece,))
        data += tensor.detach().numpy().tobytes()
    written = write_file(begin(root, step) / shard, data)
    manifest = Manifest(
        step=step, position=step, tokens=step * 256, loss=2.0, global_batch=8, seed=0,
        world_size=1, loss_scale=None, versions={}, created=0.0, files={shard: written},
    )  # fmt: skip
    publish(root, manifest, dump_index(index), json.dumps(plan.to_dict()).encode())
