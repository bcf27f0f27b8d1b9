"""How evenly tokens go to experts: a count for each expert of each block.

The experts of each token are seen where they are used, in the call of the module of experts. So the
count is of what was computed, whatever scores, biases or groups a router chooses by. Counts stay on
the device, and on the rank, until a step is logged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.metrics.progress_line import ExpertLoad
from shardwise.model.expert_modules import find_experts
from shardwise.training.seen import recorded


def watch_experts(model: nn.Module) -> None:
    """Let modules of experts record the experts of each token while a counter asks for it.

    This comes before compile, which must see it. A hook sees the call whatever forward the module
    gets later.
    """
    for experts in find_experts(model):
        experts.module.seen_experts = None  # type: ignore[assignment]
        experts.module.register_forward_pre_hook(_recorder(experts.argument), with_kwargs=True)


def _recorder(argument: str) -> Callable[..., None]:
    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.seen_experts is not None:
            chosen = args[1] if len(args) > 1 else kwargs[argument]
            module.seen_experts = (*module.seen_experts, chosen)

    return record


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of each expert on this rank, still on the device."""

    tokens: Tensor
    """By block and expert; the last column is for tokens that no expert gets."""

    num_experts: tuple[int, ...]
    """The number of experts of each block."""


class ExpertCounter:
    """Counts the tokens of each expert of a model whose experts are watched."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        experts = find_experts(model)
        self._modules: list[Any] = [each.module for each in experts]
        self._num_experts = tuple(each.num_experts for each in experts)
        self._device = device

    @contextmanager
    def counting(self) -> Iterator[list[TokenCounts]]:
        """Count the tokens of the forward inside the block. The list has one entry afterwards, or
        none for a dense model."""
        found: list[TokenCounts] = []
        with recorded(self._modules, "seen_experts") as seen:
            yield found
        if seen:
            rows = torch.stack([self._count(each) for each in seen])
            found.append(TokenCounts(rows, self._num_experts))

    def _count(self, seen: Sequence[Tensor]) -> Tensor:
        """The tokens of each expert of one module. bincount would make the host wait for the
        device."""
        last = max(self._num_experts)
        counts = torch.zeros(last + 1, dtype=torch.int64, device=self._device)
        one = torch.ones((), dtype=torch.int64, device=self._device)
        for each in seen:
            chosen = each.flatten().clamp(max=last)
            counts.scatter_add_(0, chosen, one.expand_as(chosen))
        return counts


def summed(parts: Sequence[TokenCounts]) -> TokenCounts | None:
    """The counts of several forwards together; None for a dense model."""
    if not parts:
        return None
    tokens = torch.stack([part.tokens for part in parts]).sum(0)
    return TokenCounts(tokens, parts[0].num_experts)


def load_of(counts: TokenCounts, group: dist.ProcessGroup) -> ExpertLoad:
    """How even the counts of all ranks are. All ranks call this together; it waits for the
    device."""
    dist.all_reduce(counts.tokens, group=group)
    rows: list[list[int]] = counts.tokens.tolist()
    blocks = [row[:size] for row, size in zip(rows, counts.num_experts, strict=True) if any(row)]
    return ExpertLoad(
        most=max(max(block) / _mean(block) for block in blocks),
        least=min(min(block) / _mean(block) for block in blocks),
        entropy=sum(map(_entropy, blocks)) / len(blocks),
        dropped=sum(map(sum, rows)) - sum(map(sum, blocks)),
    )


def _mean(block: Sequence[int]) -> float:
    return sum(block) / len(block)


def _entropy(block: Sequence[int]) -> float:
    """The entropy of a token's expert, as a share of its maximum: 1 where all get as many."""
    shares = [count / sum(block) for count in block if count]
    return -sum(share * math.log(share) for share in shares) / math.log(len(block))
