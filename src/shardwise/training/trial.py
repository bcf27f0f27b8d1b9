"""A few tokens through a model before it is trained, to see whether next-token training suits
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError, brief
from shardwise.parallel.shard import reshard_all
from shardwise.plan.planned import Plan

_LENGTH = 8
# Errors of families that need more than tokens: images, another model's states, a language.
NEEDS_MORE = (AssertionError, AttributeError, LookupError, TypeError, ValueError)


@contextmanager
def trying(model: Any) -> Iterator[None]:
    """Inside, forwards of a sharded model leave nothing behind: no dropout, no gradient, no
    gathered parameter, and no graph that is compiled for a few tokens."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)
        reshard_all(model)


def few_tokens(plan: Plan, shift: int = 0) -> Tensor:
    """A short sequence that the model has rows and positions for; `shift` changes its second half.

    Vocabularies may be smaller than the sequence, so tokens come again.
    """
    ids = torch.arange(whole_rows(min(_LENGTH, plan.settings.data.seq_len), plan))
    ids[len(ids) // 2 :] += shift
    return (ids % plan.model.vocab_size)[None]


def whole_rows(length: int, plan: Plan) -> int:
    """The next length that ranks which divide a sequence's tokens can divide."""
    parts = plan.decided.tensor if plan.decided.sequence_parallel else 1
    return -(-length // parts) * parts


def validate_trainable(model: Any, plan: Plan, device: torch.device) -> None:
    """Raise unless the model gives logits for tokens alone, and no token sees a later one."""
    if any(hasattr(module, "backward_pass") for module in model.modules()):
        raise _refusal(model, "its reversible layers compute gradients past FSDP2's hooks")
    try:
        with trying(model):
            first, second = (
                model(input_ids=few_tokens(plan, shift).to(device), use_cache=False).logits
                for shift in (0, 1)
            )
    except NEEDS_MORE as error:
        lines = str(error).strip().splitlines() or [""]
        why = f"its forward gives no logits for tokens alone: {type(error).__name__}: {lines[0]}"
        raise _refusal(model, why) from error
    except RuntimeError as error:
        if plan.decided.param_dtype == "fp32" or not _mixes_dtypes(error):
            raise
        raise UserError(
            f"{model.config.model_type} models do not run in {plan.decided.param_dtype}",
            why=f"parameters meet buffers or constants that stay fp32: {brief(error)}",
            fix="write precision.param=fp32",
        ) from error
    shape = few_tokens(plan).shape
    if first.shape[:2] != shape:
        raise _refusal(model, f"its logits for {shape[1]} tokens have shape {list(first.shape)}")
    shared = shape[1] // 2
    if not _same_up_to_rounding(first[:, :shared], second[:, :shared]):
        raise _refusal(model, "its attention is not causal: a token sees those that follow it")


def _mixes_dtypes(error: RuntimeError) -> bool:
    """Whether torch refused an operation because of its operands' formats. It has no class for
    that."""
    return any(words in str(error) for words in ("same dtype", "scalar type"))


def _same_up_to_rounding(first: Tensor, second: Tensor) -> bool:
    """Experts compute all tokens of a batch together, so other tokens may show."""
    rounding = 1e-5 if first.dtype == torch.float32 else 2e-2
    first, second = first.float(), second.float()
    return bool((first - second).abs().max() <= rounding * first.abs().max())


def _refusal(model: nn.Module, why: str) -> UserError:
    config: Any = model.config
    fix = "name a model that AutoModelForCausalLM trains on text alone: model.name=DIR"
    if getattr(config, "is_decoder", None) is False:
        fix = f"set model.overrides.is_decoder=true, or {fix}"
    return UserError(f"{config.model_type} models cannot be trained here", why=why, fix=fix)
