"""What each kind of block computes, counted from the family's own code.

A block runs forward and backward on tensors without data, and every operator is seen: the sizes of
its matmuls, and the bytes that it moves without the compiler. What it moves with the compiler
follows from the compiler's graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from shardwise.facts.block_work import Attention, Matmul, Moved
from shardwise.internals.dispatch_mode import TorchDispatchMode, tree_leaves
from shardwise.internals.graphs import Graphs
from shardwise.parallel.block_call import BlockCall
from shardwise.parallel.fused import lone_bytes, moved_by
from shardwise.parallel.operator_kinds import is_created, is_matmul, is_view


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator."""

    target: Any
    inputs: list[Tensor]
    results: list[Tensor]


@dataclass(frozen=True, slots=True)
class Watched:
    """Every operator of one forward and its backward."""

    known: set[int]
    """Storages that are there in any case, such as those of parameters."""

    gradient: Tensor
    """The gradient that backward begins with."""

    forward: list[Operator]
    backward: list[Operator]
    saved: dict[int, Tensor]
    """What forward has saved, by storage."""


class _Watch(TorchDispatchMode):
    """Notes operators."""

    def __init__(self, found: list[Operator]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        result = func(*args, **(kwargs or {}))
        inputs, results = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
            for tree in ((args, kwargs), result)
        )
        self._found.append(Operator(func, inputs, results))
        return result


def watch(call: BlockCall, known: set[int]) -> Watched:
    """Run a block forward and backward, without the compiler."""
    forward: list[Operator] = []
    backward: list[Operator] = []
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in known:
            saved[storage_of(tensor)] = tensor
        return tensor

    with _Watch(forward), saved_tensors_hooks(note, lambda tensor: tensor):
        output = call.block(*call.args, **call.kwargs)
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    result = next(leaf for leaf in leaves if leaf.requires_grad)
    learned = [call.learns, *(p for p in call.block.parameters() if p.requires_grad)]
    gradient = torch.ones_like(result)
    with _Watch(backward):
        torch.autograd.grad(result, learned, gradient, allow_unused=True)
    return Watched(known, gradient, forward, backward, saved)


def storage_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return id(tensor.untyped_storage())


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes for each token of a call."""

    tokens: int
    weights: frozenset[int]
    """Sizes of the block's parameters. What is as large is a weight or its gradient, and costs the
    same however many tokens there are."""

    def bytes(self, tensor: Tensor, elements: int) -> float:
        """The bytes of so many elements of a tensor, for each token."""
        return 0.0 if self.is_weight(tensor) else elements * tensor.itemsize / self.tokens

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a weight or its gradient."""
        size = tensor.numel()
        return size in self.weights and size % self.tokens != 0


def scale_of(call: BlockCall, tokens: int) -> Scale:
    """The scale of a block's call with so many tokens."""
    return Scale(tokens, frozenset(parameter.numel() for parameter in call.block.parameters()))


def eager_passes(seen: Watched, scale: Scale) -> Moved:
    """What a block moves where every operator reads its inputs and writes its results."""
    forward, backward = (
        sum(_moved(each, scale) for each in part) for part in (seen.forward, seen.backward)
    )
    return Moved(
        round(forward),
        round(backward),
        sum(not _is_free(o) for o in (*seen.forward, *seen.backward)),
    )


def compiled_passes(graphs: Graphs, scale: Scale) -> Moved:
    """What the compiler's kernels move."""
    forward, backward = (
        [moved_by(graph, scale.tokens, scale.bytes) for graph in part]
        for part in (graphs.forward, graphs.backward)
    )
    return Moved(
        round(sum(moved for moved, _ in forward)),
        round(sum(moved for moved, _ in backward)),
        sum(count for _, count in (*forward, *backward)),
    )


def _is_free(each: Operator) -> bool:
    return is_view(each.target) or is_created(each.target) or not each.results


def _moved(each: Operator, scale: Scale) -> float:
    if _is_free(each):
        return 0.0

    def size(tensor: Tensor) -> float:
        # An expanded tensor is read from the memory that it has.
        in_memory = tensor.untyped_storage().nbytes() // tensor.itemsize
        return scale.bytes(tensor, min(tensor.numel(), in_memory))

    return lone_bytes(each.target, each.inputs, each.results, size)


def matmuls_of(operators: Iterable[Operator], tokens: int) -> tuple[Matmul, ...]:
    """The matmuls among operators, but not those of scores."""
    found: Counter[Matmul] = Counter()
    for each in operators:
        if is_matmul(each.target) and not _has_scores(each, tokens):
            found[_matmul(each.inputs, tokens)] += 1
    return tuple(replace(matmul, count=count) for matmul, count in found.items())


def _matmul(inputs: Sequence[Tensor], tokens: int) -> Matmul:
    # A bias comes first, offsets of groups last.
    left, right = (tensor for tensor in inputs if tensor.dim() > 1 and tensor.is_floating_point())
    *batch, rows, inner = left.shape
    width = right.shape[-1]
    if rows % tokens and width % tokens == 0:
        rows, width = width, rows
    groups = right.shape[0] if left.dim() < right.dim() else 1
    for size in batch:
        rows *= size
    return Matmul(
        rows=rows / tokens,
        inner=inner,
        width=width,
        groups=groups,
        fp32=left.dtype == torch.float32,
    )


def _has_scores(each: Operator, tokens: int) -> bool:
    sizes = [tensor.numel() for tensor in (*each.inputs, *each.results)]
    return any(size and size % tokens**2 == 0 for size in sizes)


def scores_of(operators: Iterable[Operator], tokens: int) -> tuple[Attention, ...]:
    """Attention that is made of matmuls, of which one makes scores and the next one uses them."""
    products = [each for each in operators if is_matmul(each.target) and _has_scores(each, tokens)]
    found = []
    for scores, mixed in zip(products[::2], products[1::2], strict=False):
        heads, _, key_width = scores.inputs[-2].shape
        found.append(
            Attention(
                heads=heads,
                kv_heads=heads,
                key_width=key_width,
                value_width=mixed.results[0].shape[-1],
            )
        )
    return tuple(found)


def last_flops(graphs: Graphs, tokens: int) -> float:
    """FLOPs of the forward matmuls that no tensor comes from which backward needs."""
    if len(graphs.forward) != 1 or len(graphs.backward) != 1:
        return 0.0
    names = {node.name for node in graphs.backward[0].nodes if node.op == "placeholder"}
    needed: set[fx.Node] = set()
    for node in reversed(graphs.forward[0].nodes):
        if node.name in names or any(user in needed for user in node.users):
            needed.add(node)
    last = [
        node
        for node in graphs.forward[0].nodes
        if node.op == "call_function" and is_matmul(node.target) and node not in needed
    ]
    operators = (
        Operator(
            node.target,
            [each.meta["val"] for each in node.all_input_nodes],
            [node.meta["val"]],
        )
        for node in last
    )
    return sum(matmul.flops for matmul in matmuls_of(operators, tokens))
