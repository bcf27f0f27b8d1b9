"""Recipes of examples/ in miniature: the same file, with a tiny model on CPU ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Run = Callable[..., Any]
EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = ("<unk>", "</s>", "<user>", "<bot>", "<end>", *"abcdefgh")
TEMPLATE = (
    "{% for m in messages %}{{ ('<user> ' if m.role == 'user' else '<bot> ') + m.content "
    "+ ' <end> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)
TINY = (
    *("data.tokenizer=tokenizer", "data.seq_len=32", "model.overrides.num_hidden_layers=1"),
    *(f"model.overrides.vocab_size={len(WORDS)}", "precision.param=fp32", "optim.warmup_steps=0"),
    *("train.steps=2", "runs_dir=runs", "checkpoint.every=1"),
)
ALONE = ("cluster=1xCPU", "train.global_batch=2")
CHATS = ("data.path=chats.jsonl", "train.eval_every=1")
RECIPES: dict[str, tuple[str, ...]] = {
    "llama-3.1-8b-sft-8xh100": ("model.name=tiny-llama", *ALONE, *CHATS),
    "llama-3.1-8b-lora-1xh100": ("model.name=tiny-llama", *ALONE, *CHATS),
    "llama-3.1-8b-offload-1xh100": ("model.name=tiny-llama", *ALONE, "data.path=texts.jsonl"),
    "qwen3-30b-a3b-lora-1xh200": (
        *("model.name=tiny-mixtral", "data.chat_template=template.jinja"),
        *(*ALONE, *CHATS),
    ),
    "llama-3.1-70b-qlora-1xh200": ("model.name=tiny-llama", *ALONE, *CHATS),
    "llama-3.1-8b-qlora-1xrtx4090": ("model.name=tiny-llama", *ALONE, *CHATS),
    "llama-3.1-8b-dpo-8xh100": (
        *("model.name=tiny-llama", *ALONE, "data.path=pairs.jsonl", "train.eval_every=1"),
    ),
    "llama-3.1-70b-hsdp-4x8xh200": (
        *("model.name=tiny-llama", "cluster=4xCPU", "mesh.replicate=2", "mesh.shard=2"),
        # Moments in bf16 are for GPUs.
        *("data.path=texts.jsonl", "train.global_batch=4", "optim.state=fp32"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    vocab = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder / "tokenizer")
    (folder / "template.jinja").write_text(TEMPLATE)
    texts = [" ".join("abcdefgh"[number % 8 :]) for number in range(60)]
    rows: dict[str, list[Any]] = {
        "texts": [{"text": text} for text in texts],
        "chats": [
            {"messages": [{"role": role, "content": text} for role in ("user", "assistant")]}
            for text in texts
        ],
        "pairs": [{"prompt": text, "chosen": "a", "rejected": "b"} for text in texts],
    }
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_in_miniature(shardwise: Run, folder: Path, name: str) -> None:
    words = (str(EXAMPLES / f"{name}.yaml"), *TINY, *RECIPES[name])
    said = shardwise("train", *words, cwd=folder).stdout
    assert "finished 2 steps" in said
    lines = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert all(event["loss"] > 0 for event in events if event["event"] == "step")
    plan = json.loads((folder / "runs" / name / "plan.json").read_text())
    has_adapters = any(word in name for word in ("lora", "dpo"))
    assert plan["choices"]["adapter"]["value"] == ("lora" if has_adapters else "none")
