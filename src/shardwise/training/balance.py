"""The losses of the routers of a mixture of experts, over the micro-batches of all ranks.

The load-balancing loss is transformers' `load_balancing_loss_func`: the number of experts times the
sum over experts of (the share of tokens that an expert gets) x (its mean probability), over the
tokens of all layers. A product of two means is not the mean of products, so ranks sum their counts
and probabilities before they multiply. Only the probabilities have a gradient, and every rank
computes that of its own tokens.

The z-loss is the mean over the tokens of all layers of the squared logarithm of the sum of their
exponentials, as in ST-MoE. It keeps logits small, where formats of few bits are exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.model.override import override_forward
from shardwise.model.routers import find_routers
from shardwise.training.seen import recorded


@dataclass(frozen=True, slots=True)
class Routing:
    """The losses of routers over all ranks, still on the device."""

    aux_loss: Tensor | None
    """The load-balancing loss; None where it is not asked for, as is the next."""

    z_loss: Tensor | None


class Balance:
    """Computes the losses of a model whose routers are watched, over the tokens of a group."""

    def __init__(
        self, model: Any, group: dist.ProcessGroup, *, aux: bool = True, z: bool = False
    ) -> None:
        routers = find_routers(model)
        self._routers: list[Any] = list(routers.indices)
        self._top_k = routers.top_k
        self._group = group
        self._aux, self._z = aux, z

    @contextmanager
    def watching(self) -> Iterator[list[Tensor]]:
        """Let routers record their logits inside the block. The list holds them afterwards."""
        logits: list[Tensor] = []
        with recorded(self._routers, "seen_logits") as seen:
            yield logits
        logits += chain.from_iterable(seen)

    def over_ranks(self, logits: Sequence[Tensor]) -> tuple[Routing, Routing]:
        """This rank's parts of the losses of this forward, and the losses over all ranks.

        All ranks call this together. The gradient of a part is the full gradient with respect to
        this rank's tokens.
        """
        if not logits:
            raise UserError(
                "the losses of routers cannot be computed: no router took part in the forward",
                fix="write train.router_aux_loss=off and train.router_z_loss=0",
            )
        rows = [each.flatten(0, -2) for each in logits]
        # Copying a number to a GPU would wait for what is queued. Filling a tensor there does not.
        num_rows = torch.full((1,), float(sum(map(len, rows))), device=rows[0].device)
        counts, mass = self._count(rows) if self._aux else (None, None)
        square = _squared(rows) if self._z else None
        mine = [each for each in (counts, mass, square, num_rows) if each is not None]
        sums = torch.cat([each.detach() for each in mine])
        dist.all_reduce(sums, group=self._group)
        whole = list(sums.split([len(each) for each in mine]))
        num_rows = whole.pop()
        z = whole_z = aux = whole_aux = None
        if square is not None:
            z, whole_z = (square / num_rows).squeeze(), (whole.pop() / num_rows).squeeze()
        if mass is not None:
            slope = len(mass) * whole[0] / num_rows.square()
            aux, whole_aux = slope @ mass, slope @ whole[1]
        return Routing(aux, z), Routing(whole_aux, whole_z)

    def _count(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """For each expert its tokens, and the sum of its probabilities."""
        counts, masses = [], []
        for each in rows:
            probabilities = F.softmax(each, dim=-1, dtype=torch.float32)
            counts.append(_chosen(probabilities.detach(), self._top_k))
            masses.append(probabilities.sum(0))
        return torch.stack(counts).sum(0), torch.stack(masses).sum(0)


def mean_routing(parts: Sequence[Routing]) -> Routing:
    """The mean of each loss."""
    return Routing(_mean(part.aux_loss for part in parts), _mean(part.z_loss for part in parts))


def _mean(losses: Iterable[Tensor | None]) -> Tensor | None:
    there = [loss for loss in losses if loss is not None]
    return torch.stack(there).mean() if there else None


def _squared(rows: Sequence[Tensor]) -> Tensor:
    """The squares of the logarithms of sums of exponentials, summed over all tokens."""
    return torch.stack([each.float().logsumexp(-1).square().sum() for each in rows]).sum()[None]


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


def _chosen(probabilities: Tensor, top_k: int) -> Tensor:
    """The number of tokens of each expert. bincount would make the host wait for the device."""
    chosen = probabilities.topk(top_k, dim=-1).indices
    return torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).sum(0)
