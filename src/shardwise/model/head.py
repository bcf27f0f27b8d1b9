"""The output head of a model, and what the model does to hidden states before it and to logits
after it.

This is found out from the family's own code, without weights. The base model and the head are
replaced by functions that return chosen numbers, and everything between and after them runs. The
model is on meta, so a learned parameter on the way shows: its result has no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.facts.head_form import HeadForm
from shardwise.kernels.cross_entropy import scaled_and_capped

NOT_LINEAR = "its head is not a linear layer over a base model"
PASSED_BY = "its forward does not pass through its base model and its head"
CHANGES_HIDDEN = "it transforms the last hidden state before the head"
CHANGES_LOGITS = "it transforms the logits after the head"
_TOKENS = 4
# At the smallest numbers no soft cap shows, at the largest nothing else. Both are powers of two.
_SMALLEST, _LARGEST = 2.0**-20, 2.0**20
_ROUNDING = 1e-5


class WholeLogits(Exception):
    """Why the loss needs the logits of all tokens at once."""


class _PassedBy(Exception):
    """A part of the base model runs, and the base model does not."""


class _Output(tuple[Tensor, ...]):
    """What a base model returns: its last hidden state, and nothing that may come with it."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def head_of(model: nn.Module) -> nn.Module | None:
    """The output head, where the model names one."""
    getter: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    return None if getter is None else getter()


def embedding_of(model: nn.Module) -> nn.Module | None:
    """The table that tokens are looked up in, where the model names one."""
    getter: Callable[[], nn.Module | None] | None = getattr(model, "get_input_embeddings", None)
    try:
        return None if getter is None else getter()
    except NotImplementedError:  # what transformers raises for a family that names none
        return None


def chunkable_head(model: nn.Module) -> tuple[nn.Linear, nn.Module]:
    """The head and the base model, where the head may be called apart from the model."""
    head, base = head_of(model), getattr(model, "base_model", model)
    if not isinstance(head, nn.Linear) or base is model:
        raise WholeLogits(NOT_LINEAR)
    return head, base


def chosen_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of many sizes and both signs, as every dtype has them. Neighbours differ, and so do
    those of one column as a rule."""
    mantissas, powers = torch.tensor([1.0, -1.25, 1.5, -1.75]), 2.0 ** torch.arange(-9, 15)
    numbers = torch.cat([torch.outer(mantissas, powers).flatten(), torch.zeros(1)])
    count = torch.Size(shape).numel()
    return numbers.to(device, dtype).repeat(count // len(numbers) + 1)[:count].view(shape)


def find_form(model: nn.Module) -> HeadForm:
    """The form of a model on meta, or WholeLogits where it has none of this kind."""
    head, base = chunkable_head(model)
    hidden = chosen_values((1, _TOKENS, head.in_features), torch.float64, torch.device("cpu"))
    values = chosen_values((1, _TOKENS, head.out_features), torch.float64, torch.device("cpu"))

    def logits_for(values: Tensor) -> tuple[Tensor, Tensor]:
        return _run(model, base, head, hidden, values)

    taken, logits = logits_for(values)
    hidden_scale = _rounded((taken / hidden)[hidden != 0].mean())
    if not _is_close(taken, hidden * hidden_scale) or (hidden_scale != 1 and head.bias is not None):
        raise WholeLogits(CHANGES_HIDDEN)
    (_, small), (_, large) = (logits_for(torch.full_like(values, x)) for x in (_SMALLEST, _LARGEST))
    scale, most = _rounded(small.mean() / _SMALLEST), _rounded(large.mean())
    has_cap = not _is_close(large, torch.full_like(large, scale * _LARGEST))
    form = HeadForm(hidden_scale=hidden_scale, scale=scale, cap=most if has_cap else None)
    if (
        most == 0
        or scale == 0
        or not _is_close(logits, scaled_and_capped(values, scale, form.cap)[0])
    ):
        raise WholeLogits(CHANGES_LOGITS)
    return form


def _run(
    model: nn.Module, base: nn.Module, head: nn.Module, hidden: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """What the head takes where the base model returns `hidden`, and the logits where the head
    returns `values`."""
    taken: list[Tensor] = []
    reached: list[str] = []

    def run_base(*_: Any, **__: Any) -> _Output:
        reached.append("base")
        return _Output([hidden.clone()])

    def run_head(given: Tensor) -> Tensor:
        reached.append("head")
        taken.append(given)
        return values.clone()

    ids = torch.zeros(1, _TOKENS, dtype=torch.long)
    with _replaced(base, run_base), _replaced(head, run_head), _guarded(base, head):
        try:
            logits = model(input_ids=ids, use_cache=False).logits
        except _PassedBy as error:
            raise WholeLogits(PASSED_BY) from error
        except Exception as error:
            # Numbers met a parameter on meta. Torch has no class for that, and code of a family may
            # raise anything.
            if not reached:
                raise WholeLogits(PASSED_BY) from error
            reason = CHANGES_LOGITS if "head" in reached else CHANGES_HIDDEN
            raise WholeLogits(reason) from error
    if reached != ["base", "head"]:
        raise WholeLogits(PASSED_BY)
    if taken[0].is_meta or taken[0].shape != hidden.shape:
        raise WholeLogits(CHANGES_HIDDEN)
    if logits.is_meta or logits.shape != values.shape:
        raise WholeLogits(CHANGES_LOGITS)
    return taken[0], logits.double()


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, `module` computes `forward`. An attribute of the module comes before its class."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _guarded(base: nn.Module, head: nn.Module) -> Iterator[None]:
    """Inside, no part of the base model runs."""

    def refuse(*_: Any) -> None:
        raise _PassedBy

    parts = [part for part in base.modules() if part is not base and part is not head]
    hooks = [part.register_forward_pre_hook(refuse) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected, rtol=_ROUNDING, atol=0.0)


def _rounded(number: Tensor) -> float:
    """Families that compute in fp32 give seven digits; the eighth is rounding."""
    return float(f"{number.item():.7g}")
