"""Parameters that several modules hold stay one parameter when a model is cut into units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import UserError
from shardwise.model.blocks import find_units
from shardwise.model.weights import tied_names, validate_ties


def build(family: str, **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        config = AutoConfig.for_model(family, vocab_size=64, **sizes)
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_bias_of_the_head_and_of_its_layer_is_in_one_unit(family: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = build(family, num_hidden_layers=2, is_decoder=True, **sizes)
    owners: dict[int, set[str]] = {}
    for unit in find_units(model).units:
        for name in unit.modules:
            for param in model.get_submodule(name).parameters():
                owners.setdefault(id(param), set()).add(unit.name)
    shared: dict[int, int] = {}
    for _, param in model.named_parameters(remove_duplicate=False):
        shared[id(param)] = shared.get(id(param), 0) + 1
    tied = [param for param, count in shared.items() if count > 1]
    assert len(tied) == 2  # the embedding, and the bias
    assert all(len(owners[param]) == 1 for param in tied)


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        if tied:
            self.second.weight = self.first.weight


def test_a_tie_that_sharding_broke_is_an_error() -> None:
    validate_ties(Tied(tied=True), tied_names(Tied(tied=True)))
    with pytest.raises(UserError, match=r"untie first\.weight and second\.weight"):
        validate_ties(Tied(tied=False), tied_names(Tied(tied=True)))
