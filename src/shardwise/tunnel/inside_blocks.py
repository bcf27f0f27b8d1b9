"""Collectives of ranks that compute a block together, or divide its sequences, without peers.

FSDP2 has no hook for these: blocks call them as operators, in compiled code too. So the operators
are replaced. Compute waits for them, as it does in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.internals.tensor_collectives import EXCHANGE, GATHER, replaced
from shardwise.tunnel.emulate import Emulator

# They belong to no unit of FSDP2.
_NO_UNIT = ""


def carried_by(
    emulator: Emulator, groups: Iterable[dist.ProcessGroup]
) -> AbstractContextManager[None]:
    """Let `emulator` carry these collectives over `groups` while the block runs."""
    wires = {str(group.group_name): group for group in groups}

    def gather(mine: Tensor, num_ranks: int, group: str) -> Tensor:
        whole = mine.new_empty(num_ranks * len(mine), *mine.shape[1:])
        emulator.all_gather(_NO_UNIT, [whole.view(-1)], [mine.reshape(-1)], wires[group])
        return whole

    def exchange(mine: Tensor, takes: Sequence[int], gives: Sequence[int], group: str) -> Tensor:
        came = mine.new_zeros(sum(takes), *mine.shape[1:])
        few = min(len(came), len(mine))

        def copy() -> None:
            came[:few].copy_(mine[:few])

        emulator.carry("all_to_all", mine.nbytes, wires[group], _NO_UNIT, copy)
        return came

    def gather_rows(rows: Tensor, group: str) -> Tensor:
        sequences, length, *rest = rows.shape
        whole = rows.new_empty(sequences, wires[group].size() * length, *rest)
        emulator.all_gather(_NO_UNIT, [whole.view(-1)], [rows.reshape(-1)], wires[group])
        return whole

    def sum_to_rows(parts: Tensor, group: str) -> Tensor:
        sequences, length, *rest = parts.shape
        rows = parts.new_empty(sequences, length // wires[group].size(), *rest)
        given = parts.contiguous().view(-1)
        emulator.reduce_scatter(_NO_UNIT, rows.view(-1), given, wires[group], dist.ReduceOp.SUM)
        return rows

    def sum_parts(parts: Tensor, group: str) -> Tensor:
        total = torch.empty_like(parts)

        def copy() -> None:
            total.copy_(parts)

        emulator.carry("all_reduce", parts.nbytes, wires[group], _NO_UNIT, copy)
        return total

    functions: dict[str, Callable[..., Tensor]] = {
        GATHER: gather,
        EXCHANGE: exchange,
        "shardwise::gather_rows": gather_rows,
        "shardwise::all_rows": gather_rows,
        "shardwise::sum_to_rows": sum_to_rows,
        "shardwise::sum_parts": sum_parts,
    }
    return replaced(functions)
