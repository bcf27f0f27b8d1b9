"""Whether all replicas hold the same bits, by checksums that they compare.

Replicas begin with the same weights and sum the same gradients, so they stay equal to the last bit.
Where they do not, a device or a link has failed silently. Every replica writes a part of a
checkpoint, which would then be a mixture that is no model.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.state import model_tensors
from shardwise.errors import ExitCode, UserError
from shardwise.model.cuts import cuts_of
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.torchao_float8 import bare
from shardwise.training.overlapped import settle
from shardwise.training.step import Reading

_WORD_BYTES = 8
# What follows the name of a parameter where one of its moments is meant.
_KIND = " ("


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison in progress on the device."""

    step: int
    names: list[str]
    checksums: Tensor
    differs: Reading


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank reports about the tensors that it shares with `peers`."""

    rank: int
    host: str
    peers: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EqualRanks:
    """Ranks that hold some tensors equal."""

    group: dist.ProcessGroup
    without: frozenset[str] = frozenset()
    """Parameters of which they hold different parts."""

    def places(self, names: Sequence[str]) -> list[int]:
        """Which of these tensors they hold equal."""
        return [
            place
            for place, name in enumerate(names)
            if name.partition(_KIND)[0] not in self.without
        ]


class Replicas:
    """The ranks that hold the same shards as this one, and those that hold copies of parameters
    that the tensor axis does not divide. Without either all of this is free."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = torch.device(mesh.devices.device_type)
        self._world = mesh.world
        self._sets = [] if mesh.replicas is None else [EqualRanks(mesh.replicas)]
        if (along := mesh.group("tensor")) is not None:
            self._sets.append(EqualRanks(along, frozenset(cuts_of(model))))
        self._pending: Comparison | None = None

    def compare(self, step: int) -> None:
        """Queue a comparison of all replicas after `step`. Nothing waits for it."""
        if not self._sets:
            return
        settle(self._optimizer)
        held = dict(_held(self._model, self._optimizer))
        # Offloaded tensors are summed on the host, and only the few sums are copied.
        checksums = torch.stack([checksum(each).to(self._device) for each in held.values()])
        differs = torch.zeros((), dtype=torch.int32, device=self._device)
        for equal in self._sets:
            own = checksums if not equal.without else checksums[equal.places([*held])]
            digest = (own * _odd_numbers(own)).sum()
            digests = digest.new_empty(equal.group.size())
            dist.all_gather_into_tensor(digests, digest.unsqueeze(0), equal.group)
            differs |= (digests != digest).any().int()
        # Only ranks that share the shard have seen the difference, and all ranks must end together.
        dist.all_reduce(differs, dist.ReduceOp.MAX, self._world.group)
        self._pending = Comparison(step, [*held], checksums, Reading(differs))

    def settle(self) -> None:
        """Raise on all ranks where the last comparison found a difference.

        Called one step later, it does not have to wait.
        """
        pending, self._pending = self._pending, None
        if pending is None or not pending.differs.value():
            return
        sums = pending.checksums.tolist()
        for equal in self._sets:
            places = equal.places(pending.names)
            share = Share(
                rank=self._world.rank,
                host=socket.gethostname(),
                peers=tuple(dist.get_process_group_ranks(equal.group)),
                checksums=tuple(sums[place] for place in places),
            )
            names, shares = [pending.names[place] for place in places], self._world.gather(share)
            if any(_odd_ones(place, shares) for place in range(len(names))):
                raise describe_difference(pending.step, names, shares)


def checksum(tensor: Tensor) -> Tensor:
    """The sum of this rank's bits, taken as integers, modulo 2**64.

    Any single changed number changes it. No copy is made, and the host does not wait.
    """
    inner = bare(tensor.detach())
    local = inner.to_local() if isinstance(inner, DTensor) else inner
    data = local.contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    words = len(data) // _WORD_BYTES * _WORD_BYTES
    return data[:words].view(torch.int64).sum() + data[words:].sum()


def describe_difference(step: int, names: Sequence[str], shares: Sequence[Share]) -> UserError:
    """The first tensor that differs, on which ranks, and how many more differ."""
    by_name = {name: found for i, name in enumerate(names) if (found := _odd_ones(i, shares))}
    (name, (other, usual)), *more = by_name.items()
    also = f"; so do {len(more)} more tensors" if more else ""
    return UserError(
        f"replicas differ after step {step}: {_named(other)} holds other bits of {name} than "
        f"{_named(usual)}{also}",
        why="replicas make the same updates, so one of these hosts has computed, kept or received "
        "a wrong number; nothing of this step was saved",
        fix="run the same command again: it goes on from the newest checkpoint, whose replicas "
        "were equal. If a host is named again, leave it out; `shardwise fabric` tests its links",
        code=ExitCode.ENVIRONMENT,
    )


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Parameters, persistent buffers and Adam's moments by name, as in a checkpoint."""
    for name, tensor in model_tensors(model).items():
        yield name.removeprefix("model."), tensor
    for name, param in model.named_parameters():
        for kind, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                yield f"{name}{_KIND}{kind})", value


def _odd_numbers(like: Tensor) -> Tensor:
    """Odd factors, so that two swapped checksums do not give the same digest."""
    return 2 * torch.arange(len(like), device=like.device) + 1


def _odd_ones(index: int, shares: Sequence[Share]) -> tuple[Share, Share] | None:
    """A rank whose tensor differs from that of most peers, and the first of those; None where all
    are equal.

    Where two ranks differ, nobody knows which one is right.
    """
    by_rank = {share.rank: share for share in shares}
    for peers in sorted({share.peers for share in shares}):
        values = [by_rank[rank].checksums[index] for rank in peers]
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in zip(peers, values, strict=True) if value != usual]
        if odd:
            return by_rank[odd[0]], by_rank[peers[values.index(usual)]]
    return None


def _named(share: Share) -> str:
    return f"rank {share.rank} on {share.host}"
