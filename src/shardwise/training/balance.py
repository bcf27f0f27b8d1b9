"""The load-balancing loss of a mixture of experts, over the micro-batches of all ranks.

It is transformers' `load_balancing_loss_func`: the number of experts times the sum over experts of
(the share of tokens that an expert gets) x (its mean probability), over the tokens of all layers. A
product of two means is not the mean of products, so ranks sum their counts and probabilities before
they multiply. Only the probabilities have a gradient, and every rank computes that of its own
tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.model.override import override_forward
from shardwise.model.routers import find_routers


@dataclass(frozen=True, slots=True)
class Routing:
    """The losses of routers over all ranks, still on the device."""

    aux_loss: Tensor


class Balance:
    """Computes the load-balancing loss of a model whose routers are watched, over the tokens of a
    group."""

    def __init__(self, model: Any, group: dist.ProcessGroup) -> None:
        routers = find_routers(model)
        self._routers: list[Any] = list(routers.indices)
        self._top_k = routers.top_k
        self._group = group

    @contextmanager
    def watching(self) -> Iterator[list[Tensor]]:
        """Let routers record their logits inside the block. The list holds them afterwards.

        A forward that backward recomputes is outside the block, so nothing is recorded twice.
        """
        seen: list[Tensor] = []
        for router in self._routers:
            router.seen_logits = ()
        try:
            yield seen
        finally:
            for router in self._routers:
                seen.extend(router.seen_logits)
                router.seen_logits = None

    def over_ranks(self, logits: Sequence[Tensor]) -> tuple[Tensor, Routing]:
        """This rank's part of the loss of this forward, and the loss over all ranks.

        All ranks call this together. The gradient of the part is the full gradient with respect to
        this rank's tokens.
        """
        if not logits:
            raise UserError(
                "the load-balancing loss cannot be computed: no router took part in the forward",
                fix="write train.router_aux_loss=off",
            )
        counts, masses, num_rows = [], [], 0
        for each in logits:
            probabilities = F.softmax(each.flatten(0, -2), dim=-1, dtype=torch.float32)
            counts.append(_count(probabilities.detach(), self._top_k))
            masses.append(probabilities.sum(0))
            num_rows += len(probabilities)
        mass = torch.stack(masses).sum(0)
        # Copying a number to a GPU would wait for what is queued. Filling a tensor there does not.
        rows = torch.full((1,), float(num_rows), device=mass.device)
        sums = torch.cat([torch.stack(counts).sum(0), mass.detach(), rows])
        dist.all_reduce(sums, group=self._group)
        whole, whole_mass, whole_rows = sums.split([len(mass), len(mass), 1])
        slope = len(mass) * whole / whole_rows.square()
        return slope @ mass, Routing(slope @ whole_mass)


def mean_routing(parts: Sequence[Routing]) -> Routing:
    """The mean of the losses."""
    return Routing(torch.stack([part.aux_loss for part in parts]).mean())


def watch_routers(model: Any) -> None:
    """Let routers record their logits while `Balance.watching` asks for it.

    This comes before recompute and compile, which must see it in forward.
    """
    alike: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for router, indices in find_routers(model).indices.items():
        alike[indices].append(router)
    for indices, routers in alike.items():
        override_forward(routers, "Watched", partial(_watched, indices))
        for router in routers:
            router.seen_logits = None


def _watched(indices: tuple[int, ...], cls: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = cls.forward(self, *args, **kwargs)
        if self.seen_logits is not None:
            logits = [output[i] if isinstance(output, tuple) else output for i in indices]
            self.seen_logits = (*self.seen_logits, *logits)
        return output

    return forward


def _count(probabilities: Tensor, top_k: int) -> Tensor:
    """The number of tokens of each expert. bincount would make the host wait for the device."""
    chosen = probabilities.topk(top_k, dim=-1).indices
    return torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).sum(0)
