"""The mean of a vector over its twins: the ranks of other sites that hold the same shard.

The links between sites are slow. So each rank sends only what its own shard has learnt, and where a
site has replicas, each of them exchanges a part, and they share the result inside the site. A sum
travels through gloo or NCCL as it is. In int8 everybody sends codes to everybody, and each twin
adds them up in the same order. Either way all twins have the same bits in the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.parallel.mesh import Mesh
from shardwise.plan.exchange_bytes import INT8_BLOCK, exchange_bytes

_LARGEST = 127


@dataclass(frozen=True, slots=True)
class Twins:
    """Whom a rank exchanges with, and in which format."""

    group: ProcessGroup
    replicas: ProcessGroup | None
    exchange: str

    @classmethod
    def of(cls, mesh: Mesh, exchange: str) -> Twins:
        """Those of this rank. There must be several sites."""
        group = mesh.group("site")
        if group is None:
            raise RuntimeError("there is one site, which has no twins")
        return cls(group, mesh.replicas, exchange)

    def send(self, numbers: Tensor) -> UnderWay:
        """Start to exchange a flat vector, which nobody changes until it has arrived."""
        replicas = 1 if self.replicas is None else self.replicas.size()
        part = -(-numbers.numel() // (replicas * INT8_BLOCK)) * INT8_BLOCK
        padded = numbers.new_zeros(replicas * part)
        padded[: numbers.numel()].copy_(numbers)
        place = 0 if self.replicas is None else self.replicas.rank()
        own = padded[place * part : (place + 1) * part]
        sent = exchange_bytes(part, self.group.size(), self.exchange)
        if self.exchange == "int8":
            codes = encode(own)
            arrived = codes.new_empty(self.group.size() * codes.numel())
            work = dist.all_gather_into_tensor(arrived, codes, group=self.group, async_op=True)
        else:
            arrived = own
            work = dist.all_reduce(arrived, group=self.group, async_op=True)
        return UnderWay(self, padded, arrived, numbers.numel(), work, sent)


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A vector that is being exchanged."""

    twins: Twins
    padded: Tensor
    arrived: Tensor
    length: int
    work: dist.Work | None
    sent_bytes: int
    """Bytes that this rank sends to other sites."""

    def mean(self) -> Tensor:
        """The mean over all sites, once it is there."""
        if self.work is not None:
            self.work.wait()
        sites, replicas = self.twins.group.size(), self.twins.replicas
        is_coded = self.twins.exchange == "int8"
        parts = [*map(decode, self.arrived.chunk(sites))] if is_coded else [self.arrived]
        own = sum(parts[1:], start=parts[0]) / sites
        if replicas is not None:
            dist.all_gather_into_tensor(self.padded, own.contiguous(), group=replicas)
            own = self.padded
        return own[: self.length]


def encode(numbers: Tensor) -> Tensor:
    """Codes of one byte each, and behind them the scale of each block in fp32; all as bytes."""
    blocks = numbers.view(-1, INT8_BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / _LARGEST
    codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return torch.cat([codes.flatten().view(torch.uint8), scales.flatten().view(torch.uint8)])


def decode(sent: Tensor) -> Tensor:
    """The numbers that codes and scales stand for."""
    num_blocks = sent.numel() // (INT8_BLOCK + 4)
    codes = sent[: num_blocks * INT8_BLOCK].view(torch.int8).view(-1, INT8_BLOCK)
    scales = sent[num_blocks * INT8_BLOCK :].view(torch.float32).view(-1, 1)
    return (codes * scales).flatten()
