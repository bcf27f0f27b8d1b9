"""What classes of transformers say about themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, masking_utils
from transformers.masking_utils import create_causal_mask

from shardwise.internals import hugging_face
from shardwise.internals.parts import PUBLIC_ONLY, Changed

SIZES = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 11, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}


def model_of(family: str, **settings: Any) -> Any:
    config = AutoConfig.for_model(family, **SIZES, **HEADS, **settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_family_names_its_block() -> None:
    assert "LlamaDecoderLayer" in hugging_face.declared_blocks(model_of("llama"))
    assert hugging_face.declared_blocks(nn.Linear(1, 1)) == set()


@pytest.mark.parametrize(
    ("attribute", "read"),
    [
        ("_keys_to_ignore_on_load_missing", hugging_face.may_be_absent),
        ("_keys_to_ignore_on_load_unexpected", hugging_face.may_stay_unread),
    ],
)
def test_a_family_names_what_its_files_may_lack_and_hold(attribute: str, read: Any) -> None:
    assert hasattr(PreTrainedModel, attribute)
    model = model_of("llama")
    setattr(model, attribute, ["^extra"])
    assert list(read(model)) == ["^extra"]
    assert list(read(nn.Linear(1, 1))) == []


def test_a_family_says_which_attentions_it_has() -> None:
    says = hugging_face.supported_attentions(model_of("llama"))
    assert says == dict.fromkeys(("sdpa", "flash", "flex", "registered"), True)


def test_a_mixture_names_its_routers() -> None:
    model = model_of("mixtral", num_local_experts=2, num_experts_per_tok=1)
    specs = [spec for part in model.modules() for spec in hugging_face.router_outputs(part)]
    assert specs
    assert hugging_face.router_outputs(model_of("llama")) == []


def test_attention_and_experts_run_the_family_s_code_for_a_while() -> None:
    model = model_of("mixtral", num_local_experts=2, num_experts_per_tok=1)
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("grouped_mm")

    def chosen() -> set[tuple[str, str]]:
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        return {(x.config._attn_implementation, x.config._experts_implementation) for x in parts}

    with hugging_face.eager_code(model):
        assert chosen() == {("eager", "eager")}
    assert chosen() == {("sdpa", "grouped_mm")}
    with hugging_face.eager_code(nn.Linear(1, 1)):
        pass


def test_a_model_fills_its_modules() -> None:
    model, layer = model_of("llama"), nn.Linear(64, 64)
    nn.init.constant_(layer.weight, 5.0)
    hugging_face.initialise_module(model, layer)
    assert layer.weight.abs().max() < 1
    assert torch.equal(layer.bias, torch.zeros(64))


def mask(positions: torch.Tensor) -> torch.Tensor | None:
    config = model_of("llama", attn_implementation="sdpa").config
    states = torch.empty(2, 4, 8)
    made: torch.Tensor | None = create_causal_mask(
        config, states, attention_mask=None, past_key_values=None, position_ids=positions
    )
    return made


def test_without_a_search_masks_are_those_of_positions_that_count_up() -> None:
    counted = torch.arange(4)[None]
    searched = mask(counted)
    find = masking_utils.find_packed_sequence_indices
    with hugging_face.unsearched_positions():
        assert masking_utils.find_packed_sequence_indices is not find
        assert mask(counted) is searched is None
        # Nobody looks: positions that jump are taken for those that do not.
        assert mask(torch.tensor([[0, 1, 0, 1]])) is None
    assert masking_utils.find_packed_sequence_indices is find
    assert mask(torch.tensor([[0, 1, 0, 1]])) is not None


def test_the_switch_lets_transformers_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PUBLIC_ONLY, "1")
    with hugging_face.unsearched_positions():
        assert mask(torch.tensor([[0, 1, 0, 1]])) is not None
        assert mask(torch.arange(4)[None]) is None


def test_a_function_that_takes_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids, x: None)
    with pytest.raises(Changed, match="takes position_ids, x"):
        hugging_face.check_positions()
