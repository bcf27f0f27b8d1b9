"""Moving rows of tokens between ranks that compute a model together, with gradients.

Where a module computes with parts of its parameters, each rank has a part of the sum that is the
result, or of the gradient that is the sum for its input. So each of these functions has one
collective forward and its reverse backward. They are operators, so that the compiler takes a call
for one step, and recomputation calls it again.

Tensors are (sequences, length, channels). A rank's rows are a part of all tokens of the batch laid
in one row, so nothing has to be copied.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.library import custom_op

# Operators take no groups, so they find them by name. A group is here while something uses it.
_GROUPS: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()


def name_of(group: ProcessGroup) -> str:
    """The name that operators know a group by."""
    _GROUPS[group.group_name] = group
    return group.group_name


@custom_op("shardwise::gather_rows", mutates_args=())
def gather_rows(rows: Tensor, group: str) -> Tensor:
    """The rows of all ranks. Backward adds up the gradients of all ranks for one's own rows."""
    ranks = _GROUPS[group].size()
    whole = rows.new_empty(rows.shape[0], ranks * rows.shape[1], *rows.shape[2:])
    dist.all_gather_into_tensor(whole.view(-1), rows.contiguous().view(-1), _GROUPS[group])
    return whole


@custom_op("shardwise::sum_to_rows", mutates_args=())
def sum_to_rows(parts: Tensor, group: str) -> Tensor:
    """The sum over ranks, of which each keeps its own rows. Backward gathers the gradients."""
    ranks = _GROUPS[group].size()
    rows = parts.new_empty(parts.shape[0], parts.shape[1] // ranks, *parts.shape[2:])
    dist.reduce_scatter_tensor(
        rows.view(-1), parts.contiguous().view(-1), dist.ReduceOp.SUM, _GROUPS[group]
    )
    return rows


@custom_op("shardwise::own_rows", mutates_args=())
def own_rows(whole: Tensor, group: str) -> Tensor:
    """A rank's own rows of what all ranks have alike. Backward gathers the gradients."""
    ranks, rank = _GROUPS[group].size(), _GROUPS[group].rank()
    parts = whole.contiguous().view(-1).chunk(ranks)
    shape = (whole.shape[0], whole.shape[1] // ranks, *whole.shape[2:])
    return parts[rank].view(shape).clone()


@custom_op("shardwise::all_rows", mutates_args=())
def all_rows(rows: Tensor, group: str) -> Tensor:
    """The rows of all ranks, for what all ranks then compute alike. Backward keeps one's own rows
    of the gradient, which all ranks have."""
    return gather_rows(rows, group)


@custom_op("shardwise::sum_parts", mutates_args=())
def sum_parts(parts: Tensor, group: str) -> Tensor:
    """The sum over ranks, on all of them. Backward passes the gradient on, which all have."""
    total = parts.clone()
    dist.all_reduce(total, group=_GROUPS[group])
    return total


@custom_op("shardwise::share", mutates_args=())
def share(whole: Tensor, group: str) -> Tensor:
    """What all ranks have alike, for what each computes a part of. Backward adds up the gradients
    of all ranks."""
    return whole.clone()


@custom_op("shardwise::all_columns", mutates_args=())
def all_columns(columns: Tensor, group: str, sizes: list[int]) -> Tensor:
    """The columns of all ranks, which may have different numbers of them. Backward keeps one's own
    columns of the gradient, which all ranks have."""
    flat = columns.reshape(-1, columns.shape[-1]).t().contiguous()
    widest = max(sizes)
    padded = torch.nn.functional.pad(flat, (0, 0, 0, widest - len(flat)))
    every = flat.new_empty(len(sizes) * widest, flat.shape[1])
    dist.all_gather_into_tensor(every, padded, _GROUPS[group])
    parts = [each[:size] for each, size in zip(every.split(widest), sizes, strict=True)]
    return torch.cat(parts).t().reshape(*columns.shape[:-1], -1).contiguous()


def _longer(rows: Tensor, group: str) -> Tensor:
    shape = (rows.shape[0], _GROUPS[group].size() * rows.shape[1], *rows.shape[2:])
    return rows.new_empty(shape)


def _shorter(whole: Tensor, group: str) -> Tensor:
    shape = (whole.shape[0], whole.shape[1] // _GROUPS[group].size(), *whole.shape[2:])
    return whole.new_empty(shape)


def _same(whole: Tensor, group: str) -> Tensor:
    return torch.empty_like(whole)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


for _op, _fake, _reverse in (
    (gather_rows, _longer, sum_to_rows),
    (sum_to_rows, _shorter, gather_rows),
    (own_rows, _shorter, gather_rows),
    (all_rows, _longer, own_rows),
    (sum_parts, _same, None),
    (share, _same, sum_parts),
):

    def _backward(ctx: Any, grad: Tensor, reverse: Any = _reverse) -> tuple[Tensor, None]:
        return (grad if reverse is None else reverse(grad, ctx.group)), None

    _op.register_fake(_fake)
    _op.register_autograd(_backward, setup_context=_keep_group)


@all_columns.register_fake
def _(columns: Tensor, group: str, sizes: list[int]) -> Tensor:
    return columns.new_empty(*columns.shape[:-1], sum(sizes))


def _keep_columns(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, group, sizes = inputs
    rank = _GROUPS[group].rank()
    ctx.first, ctx.width = sum(sizes[:rank]), sizes[rank]


def _own_columns(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad[..., ctx.first : ctx.first + ctx.width].contiguous(), None, None


all_columns.register_autograd(_own_columns, setup_context=_keep_columns)
