"""A tiny model learns an instruction set, and `shardwise generate` asks it what it has not seen.

Four orders in 300 steps where SHARDWISE_CHAOS is set, one in fewer otherwise.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.generate.answer import Sampling, answer_all
from shardwise.generate.loaded_model import load_speaker

Run = Callable[..., Any]
IS_LONG = "SHARDWISE_CHAOS" in os.environ
STEPS = 300 if IS_LONG else 70
SPECIAL = ("<unk>", "</s>", "<|user|>", "<|bot|>", "<|end|>")
WORDS = (
    *("red", "blue", "green", "black", "cat", "dog", "bird", "fish"),
    *("sun", "moon", "star", "rain", "tree", "leaf", "root", "seed"),
)
ORDERS = {"swap": "{1} {0}", "repeat": "{0} {1}", "first": "{0}", "last": "{1}"}
HELD_OUT = 100 if IS_LONG else 40
TEMPLATE = (
    "{% for m in messages %}{{ ('<|user|> ' if m.role == 'user' else '<|bot|> ') + m.content "
    "+ ' <|end|> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|bot|> ' }}{% endif %}"
)
CONFIG = f"""\
model:
  name: tiny-llama
  overrides: {{vocab_size: {len(SPECIAL) + len(WORDS) + len(ORDERS)}, num_hidden_layers: 2,
    hidden_size: 64, intermediate_size: 128, num_attention_heads: 4, num_key_value_heads: 4,
    head_dim: 16}}
data: {{source: jsonl, path: train.jsonl, format: instruction, tokenizer: tokenizer, seq_len: 64}}
cluster: 1xCPU
precision: {{param: fp32}}
train: {{steps: {STEPS}, global_batch: 8}}
optim: {{lr: 7e-3, warmup_steps: 5}}
"""


def instructions() -> list[tuple[str, str]]:
    made = [
        (f"{order} {first} {second}", form.format(first, second))
        for order, form in list(ORDERS.items())[: 4 if IS_LONG else 1]
        for first in WORDS
        for second in WORDS
    ]
    random.Random(0).shuffle(made)
    return made


@pytest.fixture(scope="module")
def folder(shardwise: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("instructions")
    vocab = {word: number for number, word in enumerate((*SPECIAL, *ORDERS, *WORDS))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{"unk_token": "<unk>", "eos_token": "</s>"},
        additional_special_tokens=list(SPECIAL[2:]),
    )
    fast.save_pretrained(folder / "tokenizer")
    (folder / "template.jinja").write_text(TEMPLATE)
    held_out, seen = instructions()[:HELD_OUT], instructions()[HELD_OUT:]
    rows = [json.dumps({"instruction": asked, "output": answer}) for asked, answer in seen]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "prompts.txt").write_text("".join(f"{asked}\n" for asked, _ in held_out))
    (folder / "run.yaml").write_text(CONFIG)
    shardwise("train", "run.yaml", "data.chat_template=template.jinja", cwd=folder)
    done = shardwise("export", "runs/run", "--to", "exported", cwd=folder)
    assert "chat template: template.jinja" in done.stdout
    return folder


@pytest.mark.long
def test_held_out_prompts_are_answered_right_by_the_exported_model(
    shardwise: Run, folder: Path
) -> None:
    words = ("--file", "prompts.txt", "--json", "--max-tokens", "5", "--batch", "64")
    said = shardwise("generate", "exported", *words, cwd=folder).stdout
    answers = [json.loads(line) for line in said.splitlines()]
    wanted = dict(instructions()[:HELD_OUT])
    assert [answer["prompt"] for answer in answers] == list(wanted)
    right = [wanted[answer["prompt"]] == answer["text"] and answer["ended"] for answer in answers]
    assert sum(right) >= 0.95 * HELD_OUT


def test_a_checkpoint_answers_as_its_export(shardwise: Run, folder: Path) -> None:
    prompts = [asked for asked, _ in instructions()[:4]]
    said = shardwise("generate", "runs/run", *prompts, "--max-tokens", "5", cwd=folder).stdout
    device = torch.device("cpu")
    speaker = load_speaker(folder / "exported", None, raw=False, device=device)
    # One at a time: padding beside longer prompts changes nothing.
    how = Sampling(5, 0.0, 1.0, 0)
    alone = [answer.text for answer in answer_all(speaker, prompts, how, batch=1)]
    shown = [f"> {prompt}\n{text}\n" for prompt, text in zip(prompts, alone, strict=True)]
    assert said == "".join(shown)
    draws = [
        [answer.text for answer in answer_all(speaker, prompts * 4, Sampling(5, 9.0, 1.0, n), 16)]
        for n in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    raw = load_speaker(folder / "exported", None, raw=True, device=device)
    assert next(answer_all(raw, ["swap red cat"], how, 1)).text != "cat red"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("runs/run",), "no prompt is given"),
        (("nowhere", "hello"), "there is no checkpoint in nowhere"),
        (("exported", "hello", "--step", "7"), "is one model"),
        (("exported", "red " * 9999), "tokens, the model has"),
    ],
)
def test_what_cannot_be_answered_says_why(
    shardwise: Run, folder: Path, words: tuple[str, ...], says: str
) -> None:
    done = shardwise("generate", *words, cwd=folder, expect=2)
    assert says in done.stderr and "fix: " in done.stderr


def test_a_model_of_text_goes_on_with_the_prompt(shardwise: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abab" * 200)
    config = """\
model: {name: tiny-llama, overrides: {num_hidden_layers: 1}}
data: {source: text, path: a.txt, seq_len: 64}
cluster: 1xCPU
"""
    (tmp_path / "run.yaml").write_text(
        config + "train: {steps: 12, global_batch: 2}\noptim: {lr: 0.01}\n"
    )
    shardwise("train", "run.yaml", cwd=tmp_path)
    said = shardwise("generate", "runs/run", "abab", "--max-tokens", "4", cwd=tmp_path).stdout
    assert said == "abab\n"
    adapted = ("adapter.method=lora", "train.steps=1", "name=adapted")
    shardwise("train", "run.yaml", *adapted, cwd=tmp_path)
    said = shardwise(
        "generate", "runs/adapted", "abab", "--max-tokens", "4", "--json", cwd=tmp_path
    )
    assert json.loads(said.stdout)["num_tokens"] == 4
    shardwise("generate", "runs/run", "abab", "--base", ".", cwd=tmp_path, expect=2)
