"""A trial of the chunked loss: whether it is the loss of a model, as a few tokens tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.facts.head_form import HeadForm
from shardwise.kernels.cross_entropy import scaled_and_capped
from shardwise.model.head import (
    CHANGES_HIDDEN,
    CHANGES_LOGITS,
    PASSED_BY,
    WholeLogits,
    chosen_values,
    chunkable_head,
)
from shardwise.training.trial import trying

# What rounding in fp32 may make of a number that is scaled and capped.
_ROUNDING = 1e-5


def why_not_chunked(model: nn.Module, ids: Tensor, form: HeadForm) -> str | None:
    """Run a few tokens through the real model: None where its logits have this form.

    The head's output is replaced by chosen numbers, and what the model makes of them is compared.
    All ranks compare alike: the numbers are the same everywhere, and so is the code.
    """
    try:
        head, base = chunkable_head(model)
    except WholeLogits as reason:
        return str(reason)
    seen: dict[str, Tensor] = {}

    def on_head(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        seen["input"] = inputs[0]
        seen["output"] = chosen_values(output.shape, output.dtype, output.device)
        # xLSTM changes it in place.
        return seen["output"].clone()

    def on_base(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        seen["hidden"] = output[0]

    hooks = [head.register_forward_hook(on_head), base.register_forward_hook(on_base)]
    with trying(model):
        logits = model(input_ids=ids).logits
    for hook in hooks:
        hook.remove()
    if seen.keys() != {"input", "output", "hidden"}:
        return PASSED_BY
    if not _is_same(seen["input"], seen["hidden"], form.hidden_scale, None):
        return CHANGES_HIDDEN
    if not _is_same(logits, seen["output"], form.scale, form.cap):
        return CHANGES_LOGITS
    return None


def _is_same(found: Tensor, given: Tensor, scale: float, cap: float | None) -> bool:
    """Whether the model has scaled and capped `given`, to the last bit where there is nothing to
    do."""
    if found.shape != given.shape:
        return False
    if scale == 1 and cap is None:
        return torch.equal(found.float(), given.float())
    # The model computes in its own dtype, and rounds after each operation.
    rounding = max(_ROUNDING, *(4 * torch.finfo(each.dtype).eps for each in (found, given)))
    expected, _ = scaled_and_capped(given.float(), scale, cap)
    return torch.allclose(found.float(), expected.to(found.dtype).float(), rounding, 0.0)


def refuse_chunked(reason: str) -> UserError:
    """The error for a user who asked for the chunked loss by name."""
    return UserError(
        "memory.loss=chunked does not give this model's loss",
        why=reason,
        fix="write memory.loss=auto, or memory.loss=full",
    )
