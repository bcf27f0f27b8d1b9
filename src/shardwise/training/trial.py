"""A few tokens through a model before it is trained, to see whether next-token training suits
it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.parallel.shard import reshard_all

_SHARED = 4
_LENGTH = 8
# Errors of families that need more than tokens: images, another model's states, a language.
_REFUSALS = (AssertionError, AttributeError, LookupError, TypeError, ValueError)


def validate_trainable(model: Any, device: torch.device) -> None:
    """Raise unless the model gives logits for tokens alone, and no token sees a later one."""
    if any(hasattr(module, "backward_pass") for module in model.modules()):
        raise _refusal(model, "its reversible layers compute gradients past FSDP2's hooks")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            first, second = (_logits(model, start, device) for start in (0, _LENGTH))
    except _REFUSALS as error:
        lines = str(error).strip().splitlines() or [""]
        why = f"its forward gives no logits for tokens alone: {type(error).__name__}: {lines[0]}"
        raise _refusal(model, why) from error
    finally:
        model.train(was_training)
        reshard_all(model)
    if list(first.shape[:2]) != [1, _LENGTH]:
        raise _refusal(model, f"its logits for {_LENGTH} tokens have shape {list(first.shape)}")
    if not _same_start(first, second):
        raise _refusal(model, "its attention is not causal: a token sees those that follow it")


def _logits(model: Any, other: int, device: torch.device) -> Tensor:
    """The logits of a sequence that begins with fixed tokens and ends with varying ones."""
    tail = torch.arange(_SHARED, _LENGTH) + other
    ids = torch.cat([torch.arange(_SHARED), tail])[None].to(device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _same_start(first: Tensor, second: Tensor) -> bool:
    """Whether the first logits are equal up to rounding: experts compute all tokens of a batch
    together, so other tokens may show."""
    start, again = first[:, :_SHARED].float(), second[:, :_SHARED].float()
    rounding = 1e-5 if first.dtype == torch.float32 else 2e-2
    return bool((start - again).abs().max() <= rounding * start.abs().max())


def _refusal(model: nn.Module, why: str) -> UserError:
    config: Any = model.config
    fix = "name a model that AutoModelForCausalLM trains on text alone: model.name=DIR"
    if getattr(config, "is_decoder", None) is False:
        fix = f"set model.overrides.is_decoder=true, or {fix}"
    return UserError(f"{config.model_type} models cannot be trained here", why=why, fix=fix)
