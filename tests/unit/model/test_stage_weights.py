"""Weights of a file in the stages of a model whose embedding is its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.errors import UserError
from shardwise.model.pretrained import load_pretrained, new_rows
from shardwise.model.stage_part import keep_stages
from shardwise.model.weights import allocate_shards

EMBEDDING, HEAD = TABLES = ("model.embed_tokens.weight", "lm_head.weight")
CPU = torch.device("cpu")


def tiny(vocab_size: int = 20) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = LlamaConfig(
        **sizes, num_hidden_layers=3, vocab_size=vocab_size, tie_word_embeddings=True
    )
    return LlamaForCausalLM(config)


def stage(own: int, vocab_size: int = 20) -> Any:
    with torch.device("meta"):
        model = tiny(vocab_size)
    keep_stages(model, [range(1), range(1, 2), range(2, 3)], [own])
    allocate_shards(model, CPU, buffers_on=CPU)
    return model


def save(place: Path, **tables: torch.Tensor) -> Any:
    """A model in files that hold its table under these names."""
    model = tiny()
    model.save_pretrained(place)
    file = place / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if name not in TABLES}
    save_file({**tensors, **tables}, file, {"format": "pt"})
    return model


@pytest.mark.parametrize("names", [(EMBEDDING,), (HEAD,), TABLES], ids=["first", "last", "both"])
def test_every_stage_finds_the_table_under_either_name(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    table = torch.randn(20, 8)
    saved = save(tmp_path, **{name: table.clone() for name in names})
    for own, others in ((0, {EMBEDDING}), (1, set[str]()), (2, set(TABLES))):
        model = stage(own)
        load_pretrained(model, tmp_path)
        here = dict(model.named_parameters(remove_duplicate=False))
        assert here.keys() & set(TABLES) == others
        for name, param in here.items():
            expected = table if name in TABLES else saved.get_parameter(name)
            assert torch.equal(param, expected), name


def test_the_first_stage_tells_of_new_rows_too(tmp_path: Path) -> None:
    save(tmp_path, **{HEAD: torch.randn(20, 8)})
    assert new_rows(stage(0, 24), tmp_path) == {HEAD: 4}


@pytest.mark.parametrize("own", [0, 2])
def test_a_stage_refuses_two_tables_and_none(tmp_path: Path, own: int) -> None:
    save(tmp_path, **{EMBEDDING: torch.randn(20, 8), HEAD: torch.randn(20, 8)})
    with pytest.raises(UserError, match="differ in the files"):
        load_pretrained(stage(own), tmp_path)
    save(tmp_path)
    with pytest.raises(UserError, match="1 tensors of the model are not in"):
        load_pretrained(stage(own), tmp_path)
