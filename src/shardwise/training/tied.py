"""The gradient of a table of tokens that the first and the last stage of a pipeline share.

The first stage looks tokens up in it, and the last one has it as its head. Each of them has a copy,
whose gradient is the sum of both. Both ranks add the same two numbers, so the copies stay equal to
the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.head import embedding_of
from shardwise.parallel.stages import Stages
from shardwise.parallel.torchao_float8 import own_part


class TiedTable:
    """Adds up the gradients of both copies. Where this rank has none, it does nothing."""

    def __init__(self, model: Any, stages: Stages | None, *, is_tied: bool) -> None:
        self._copy: Tensor | None = None
        self._stages, self._is_head = stages, False
        if stages is None or not is_tied:
            return
        self._is_head = stages.last in stages.own
        if self._is_head or 0 in stages.own:
            table: Any = embedding_of(model)
            self._copy = table.weight

    def reduce(self) -> None:
        """Exchange gradients with the rank that has the same part of the other copy."""
        if self._stages is None or self._copy is None or self._copy.grad is None:
            return
        mine = own_part(self._copy.grad)
        if not mine.numel():
            return
        sent, received = mine.contiguous(), torch.empty_like(mine)
        other = self._stages.owner(0 if self._is_head else self._stages.last)
        both = (dist.isend, sent), (dist.irecv, received)
        calls = [
            dist.P2POp(call, tensor, group=self._stages.group, group_peer=other)
            for call, tensor in both
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        mine.add_(received)

    def counts(self, param: Tensor) -> bool:
        """Whether a parameter is in this rank's part of a norm. The table is in the first stage's
        alone."""
        return not (self._is_head and param is self._copy)
