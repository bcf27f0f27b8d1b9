"""A model that is pinned to a revision is trained with the tokenizer of that revision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.data.tokenizer import HubTokenizer

pytestmark = pytest.mark.dist
REPO = "some/model"
MAIN, PINNED = "a" * 40, "b" * 40
SHAPE: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
}
CONFIG = """\
data: {source: text, path: text.txt, seq_len: 8, eval_fraction: 0}
cluster: 1xCPU
train: {steps: 1, global_batch: 2}
"""


def save_revision(hub: Path, revision: str, words: tuple[str, ...]) -> str:
    """A snapshot in the layout of the hub's cache; returns its tokenizer's identity."""
    folder = hub / "models--some--model" / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    vocab = {word: number for number, word in enumerate(("<unk>", "</s>", *words))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(folder)
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    return HubTokenizer(REPO, loaded).identity


# The hub's library reads its variables when it is imported, which the fork server did long ago.
READ_AGAIN = """\
import os
from huggingface_hub import constants

constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = os.environ["HF_HUB_CACHE"], True
"""


def test_the_tokenizer_is_that_of_the_pinned_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shardwise: Callable[..., Any]
) -> None:
    hub = tmp_path / "hub"
    of_main = save_revision(hub, MAIN, ("hello", "world"))
    of_pinned = save_revision(hub, PINNED, ("world", "hello"))
    assert of_main != of_pinned
    (hub / "models--some--model" / "refs").mkdir()
    (hub / "models--some--model" / "refs" / "main").write_text(MAIN)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("sitecustomize.py").write_text(READ_AGAIN)
    Path("text.txt").write_text("hello world " * 200)
    Path("run.yaml").write_text(CONFIG)
    words = (f"model.name={REPO}", "model.weights=random")
    shardwise("train", "run.yaml", *words, "name=main")
    shardwise("train", "run.yaml", *words, "name=pinned", f"model.revision={PINNED}")
    assert tokenizer_of(Path("runs/main")) == of_main
    assert tokenizer_of(Path("runs/pinned")) == of_pinned


def tokenizer_of(run: Path) -> str:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (name,) = {event["tokenizer"] for event in events if event["event"] == "data"}
    return str(name)
