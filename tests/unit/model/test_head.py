"""What a model does around its head, found out from its code alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.facts.head_form import PLAIN, HeadForm
from shardwise.facts.presets import PRESETS
from shardwise.model.build import build_on_meta
from shardwise.model.counted_sizes import count_on_meta
from shardwise.model.head import CHANGES_HIDDEN, CHANGES_LOGITS, WholeLogits, find_form

Change = Callable[[Any, Tensor], Tensor]
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def made(after: Change, before: Change = lambda self, hidden: hidden, *, bias: bool = False) -> Any:
    """A model whose forward has something of its own before and after the head."""
    model: Any = build_on_meta(PRESETS["tiny-llama"])
    with torch.device("meta"):
        model.temperature = nn.Parameter(torch.ones(1))
        model.last_norm = nn.LayerNorm(model.config.hidden_size)
        if bias:
            model.lm_head.bias = nn.Parameter(torch.zeros(model.config.vocab_size))

    def forward(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        output = self.model(input_ids=input_ids, **kwargs)
        output.logits = after(self, self.lm_head(before(self, output.last_hidden_state)))
        return output

    model.__class__ = type("Made", (type(model),), {"forward": forward})
    return model


@pytest.mark.parametrize(
    ("after", "form"),
    [
        (lambda self, x: x, PLAIN),
        (lambda self, x: x.float(), PLAIN),
        (lambda self, x: x / 12, HeadForm(scale=0.08333333)),
        (lambda self, x: -x * 8, HeadForm(scale=-8.0)),
        (lambda self, x: 30 * torch.tanh(x.float() / 30), HeadForm(cap=30.0)),
        (lambda self, x: 50 * torch.tanh(x * 0.2 / 50), HeadForm(scale=0.2, cap=50.0)),
        (lambda self, x: 50 * torch.tanh(x), HeadForm(scale=50.0, cap=50.0)),
    ],
)
def test_a_scale_and_a_cap_are_found(after: Change, form: HeadForm) -> None:
    assert find_form(made(after)) == form


@pytest.mark.parametrize(
    "after",
    [
        lambda self, x: x + 1e-3,
        lambda self, x: x.clamp(-30, 30),
        lambda self, x: 30 * torch.nn.functional.softsign(x / 30),
        lambda self, x: x * torch.arange(1.0, x.shape[1] + 1)[:, None],
        lambda self, x: x * torch.linspace(1, 1.1, x.shape[2]),
        lambda self, x: torch.where(x > 0, x, 0.5 * x),
        lambda self, x: x - x.mean(-1, keepdim=True),
        lambda self, x: x[..., :-1],
        lambda self, x: 0 * x,
        lambda self, x: x / 0,
        # A number that is learned would not stay what it was found to be.
        lambda self, x: x * self.temperature,
        lambda self, x: x * self.temperature.item(),
    ],
)
def test_another_change_of_logits_is_refused(after: Change) -> None:
    with pytest.raises(WholeLogits, match=CHANGES_LOGITS):
        find_form(made(after))


@pytest.mark.parametrize(
    "before",
    [
        lambda self, x: self.last_norm(x),
        lambda self, x: x * self.temperature,
        lambda self, x: x.tanh(),
        lambda self, x: x + 1,
        lambda self, x: x.flip(-1),
    ],
)
def test_another_change_of_hidden_states_is_refused(before: Change) -> None:
    with pytest.raises(WholeLogits, match=CHANGES_HIDDEN):
        find_form(made(lambda self, x: x, before))


def test_hidden_states_are_scaled_before_a_head_without_bias() -> None:
    before, after = (lambda self, x: x / 10), (lambda self, x: x * 3)
    form = find_form(made(after, before))
    assert form == HeadForm(hidden_scale=0.1, scale=3.0)
    assert form.logit_scale == pytest.approx(0.3)
    with pytest.raises(WholeLogits, match=CHANGES_HIDDEN):
        find_form(made(after, before, bias=True))


def test_a_forward_that_passes_its_base_model_by_is_refused() -> None:
    model = build_on_meta({"model_type": "opt", **OPT}, attention=None)
    with pytest.raises(WholeLogits, match="does not pass through its base model"):
        find_form(model)


def test_a_model_is_as_it_was_afterwards() -> None:
    model = made(lambda self, x: x)
    hooks = [len(part._forward_pre_hooks) for part in model.modules()]
    find_form(model)
    assert hooks == [len(part._forward_pre_hooks) for part in model.modules()]
    assert not any("forward" in vars(part) for part in model.modules())


def test_sizes_have_the_form_or_the_reason() -> None:
    sizes = count_on_meta("opt", {"model_type": "opt", **OPT})
    assert "does not pass through" in sizes.whole_logits
    gemma = {"model_type": "gemma2", "final_logit_softcapping": 7.0, "num_hidden_layers": 2}
    sizes = count_on_meta("gemma", gemma)
    assert (sizes.head, sizes.whole_logits) == (HeadForm(cap=7.0), "")
    assert type(sizes).from_dict(sizes.to_dict()) == sizes
