from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.errors import UserError
from shardwise.model.new_rows import table_params
from shardwise.model.pretrained import load_pretrained, new_rows

SIZES: dict[str, Any] = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}


def tiny(vocab_size: int, *, tied: bool) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocab_size, tie_word_embeddings=tied))


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows_begin_with_the_mean_of_the_stored_ones(tmp_path: Path, tied: bool) -> None:
    stored, model = tiny(20, tied=tied), tiny(24, tied=tied)
    stored.save_pretrained(tmp_path)
    names = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert new_rows(model, tmp_path) == dict.fromkeys(names, 4)
    load_pretrained(model, tmp_path)
    for name in names:
        before, after = stored.get_parameter(name), model.get_parameter(name)
        assert torch.equal(after[:20], before)
        assert torch.allclose(after[20:], before.mean(0).expand(4, -1), atol=1e-6)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_fewer_rows_and_other_widths_are_still_refused(tmp_path: Path) -> None:
    tiny(20, tied=False).save_pretrained(tmp_path)
    wide = LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 16}, vocab_size=24))
    for model in (tiny(16, tied=False), wide):
        with pytest.raises(UserError, match="has shape"):
            load_pretrained(model, tmp_path)


class Nameless(torch.nn.Module):
    """As a family of transformers that does not say what its embedding is."""

    def get_input_embeddings(self) -> torch.nn.Module:
        raise NotImplementedError


@pytest.mark.parametrize("model", [Nameless(), torch.nn.Linear(2, 2)])
def test_a_model_that_names_no_table_has_none(model: torch.nn.Module) -> None:
    assert table_params(model) == set()
