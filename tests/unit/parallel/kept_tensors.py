"""What a small model keeps for backward, and the gradients that it has then."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

TOKENS = 24


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.model.layers)  # type: ignore[union-attr, arg-type]


def kept_and_gradients(model: nn.Module) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """Shapes that a forward keeps for backward, and what backward makes of it."""
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    tokens = torch.arange(TOKENS)[None] % 64
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    grads = [param.grad for param in model.parameters()]
    return kept, [loss.detach(), *(grad for grad in grads if grad is not None)]
