"""The bytes that a compiled graph moves outside of matmuls and attention, and its kernels.

The compiler fuses element-wise operators and reductions. So between two matmuls a tensor is read
once and a result is written once, however many operators there are. The rules here:

- What a matmul, an attention, a sort or the graph's end needs is written. What is only needed by
  other element-wise operators is computed where it is needed.
- Results that can be computed at the same time (after the same matmuls) are one kernel if they read
  a tensor in common. Reductions over tokens, as those of a norm's weight, are kernels of their own.
- A reduction over a row reads the row once: a second pass finds it in the cache.
- Every other operator (sort, scatter, convolution) reads its inputs and writes its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, fx

from shardwise.parallel.operator_kinds import (
    EPILOGUES,
    GATHERS,
    REDUCTIONS,
    is_created,
    is_fused,
    is_heavy,
    is_view,
    name_of,
)

T = TypeVar("T")
Size = Callable[[T], float]
Weigh = Callable[[Tensor, int], float]
"""The bytes of so many elements of a tensor."""


@dataclass(slots=True)
class _Kernel:
    """Results that are computed together."""

    reads: dict[fx.Node, int] = field(default_factory=dict)
    """Elements that are read of each tensor."""

    writes: set[fx.Node] = field(default_factory=set)


def moved_by(graph: fx.Graph, tokens: int, weigh: Weigh) -> tuple[float, int]:
    """The bytes that a graph over so many tokens moves, and its kernels."""
    kernels = [
        kernel
        for together in _by_time(graph, tokens).values()
        for kernel in _joined([_kernel_of(node, set(together)) for node in together])
    ]
    moved = sum(map(_bytes_of(weigh), kernels))
    count = len(kernels)
    for node in graph.nodes:
        if node.op != "call_function" or not stands_alone(node):
            continue
        count += 1
        moved += lone_bytes(node.target, node.all_input_nodes, results_of(node), _whole_of(weigh))
    return moved, count


def lone_bytes(target: Any, inputs: Sequence[T], results: Sequence[T], size: Size[T]) -> float:
    """The bytes that an operator which is not fused moves besides what a matmul moves."""
    if name_of(target) in EPILOGUES:
        # The matmul itself reads the first two. What it loses to the rest is what a kernel of its
        # own would take.
        inputs = inputs[2:]
    elif is_heavy(target):
        return 0.0
    return sum(map(size, inputs)) + sum(map(size, results))


def base_of(node: fx.Node) -> fx.Node:
    """The tensor that a view is a view of."""
    while node.op == "call_function" and is_view(node.target):
        node = node.args[0]  # type: ignore[assignment]
    return node


def stands_alone(node: fx.Node) -> bool:
    """Whether it is a kernel that nothing is fused with."""
    target = node.target
    is_free = is_view(target) or is_created(target) or name_of(target) == "getitem"
    return not is_free and not is_fused(target) and bool(results_of(node))


def results_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for an operator's results."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    return [user for user in node.users if name_of(user.target) == "getitem"]


def _is_inlined(node: fx.Node) -> bool:
    return node.op == "call_function" and is_fused(node.target) and not _is_reduction(node)


def _is_reduction(node: fx.Node) -> bool:
    return node.op == "call_function" and name_of(node.target) in REDUCTIONS


def _by_time(graph: fx.Graph, tokens: int) -> dict[tuple[int, bool], list[fx.Node]]:
    """What is written by fused kernels: by the number of kernels of their own that come before it,
    and by whether it is a reduction over tokens."""
    time: dict[fx.Node, int] = {}
    found: dict[tuple[int, bool], list[fx.Node]] = {}
    for node in graph.nodes:
        before = max((time[each] for each in node.all_input_nodes), default=0)
        alone = node.op == "call_function" and stands_alone(node)
        time[node] = before + alone
        if is_written(node):
            result = node.meta.get("val")
            size = result.numel() if isinstance(result, Tensor) else 0
            over_tokens = _is_reduction(node) and size % tokens != 0
            found.setdefault((before, over_tokens), []).append(node)
    return found


def is_written(node: fx.Node) -> bool:
    """Whether a fused operator's result goes through memory."""
    if _is_reduction(node):
        return True
    return _is_inlined(node) and any(map(_needs_memory, _uses(node)))


def _needs_memory(use: fx.Node) -> bool:
    return use.op == "output" or stands_alone(use)


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """Those that use it, or a view of it."""
    for user in node.users:
        if user.op == "call_function" and is_view(user.target):
            yield from _uses(user)
        yield user


def _kernel_of(node: fx.Node, together: set[fx.Node]) -> _Kernel:
    kernel = _Kernel(writes={node})
    seen: set[fx.Node] = set()

    def read(each: fx.Node, elements: int | None) -> None:
        base = base_of(each)
        result = base.meta.get("val")
        if not isinstance(result, Tensor):
            return
        size = elements or min(_size(each), result.numel())
        if base in together:
            # Computed by the same kernel, if it is the same.
            kernel.reads.setdefault(base, 0)
        elif _is_inlined(base) and not is_written(base):
            visit(base)
        elif not (base.op == "call_function" and is_created(base.target)):
            kernel.reads[base] = max(size, kernel.reads.get(base, 0))

    def visit(each: fx.Node) -> None:
        if each in seen:
            return
        seen.add(each)
        for place, source in enumerate(each.all_input_nodes):
            gathers = place == 0 and name_of(each.target) in GATHERS
            read(source, _size(each) if gathers else None)

    visit(node)
    return kernel


def _size(node: fx.Node) -> int:
    result = node.meta.get("val")
    return result.numel() if isinstance(result, Tensor) else 0


def _joined(kernels: list[_Kernel]) -> list[_Kernel]:
    """Kernels that touch a tensor in common become one."""
    joined: list[_Kernel] = []
    for kernel in kernels:
        touches = kernel.reads.keys() | kernel.writes
        alike = [each for each in joined if touches & (each.reads.keys() | each.writes)]
        for each in alike:
            joined.remove(each)
            kernel.writes |= each.writes
            for node, size in each.reads.items():
                kernel.reads[node] = max(size, kernel.reads.get(node, 0))
        joined.append(kernel)
    return joined


def _bytes_of(weigh: Weigh) -> Callable[[_Kernel], float]:
    def moved(kernel: _Kernel) -> float:
        reads = sum(
            weigh(node.meta["val"], size)
            for node, size in kernel.reads.items()
            if node not in kernel.writes
        )
        return reads + sum(map(_whole_of(weigh), kernel.writes))

    return moved


def _whole_of(weigh: Weigh) -> Callable[[fx.Node], float]:
    def whole(node: fx.Node) -> float:
        result: Any = node.meta.get("val")
        return weigh(result, result.numel()) if isinstance(result, Tensor) else 0.0

    return whole
