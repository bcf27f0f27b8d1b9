"""How much memory a block's backward needs above what forward has saved.

Backward is followed operator by operator. A tensor takes memory from where it is made until nothing
needs it any more. What is saved gives its memory back after its last use. With the compiler a fused
kernel writes over a gradient of the same size that nothing else needs, and only what goes through
memory counts (`fused.py` has the rules). Gradients of weights are no part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, fx

from shardwise.internals.graphs import Graphs
from shardwise.parallel.fused import is_written, results_of, stands_alone
from shardwise.parallel.work import Scale, Watched, storage_of


def eager_peak(seen: Watched, scale: Scale) -> int:
    """Bytes of a token at the peak, without the compiler."""
    ends: dict[int, int] = {}
    for place, each in enumerate(seen.backward):
        for tensor in (*each.inputs, *each.results):
            ends[storage_of(tensor)] = place
    result = seen.gradient
    held = {**seen.saved, storage_of(result): result}
    now = peak = scale.bytes(result, result.numel())
    for place, each in enumerate(seen.backward):
        for tensor in each.results:
            if storage_of(tensor) not in held and storage_of(tensor) not in seen.known:
                held[storage_of(tensor)] = tensor
                now += _whole_storage(tensor, scale)
        peak = max(peak, now)
        for storage in [storage for storage in held if ends.get(storage, -1) == place]:
            now -= _whole_storage(held.pop(storage), scale)
    return round(peak)


def _whole_storage(tensor: Tensor, scale: Scale) -> float:
    return scale.bytes(tensor, tensor.untyped_storage().nbytes() // tensor.itemsize)


def compiled_peak(graphs: Graphs, scale: Scale) -> int | None:
    """The same with the compiler. None where it cannot trace the block in one piece."""
    if len(graphs.backward) != 1:
        return None
    return max(_followed(graphs.backward[0], scale), default=0)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """The memory of one tensor."""

    token_bytes: int
    ends: int
    """The place of the last kernel that needs it."""

    is_saved: bool


def _followed(graph: fx.Graph, scale: Scale) -> Iterator[int]:
    """Bytes of a token after each kernel."""
    uses = _last_uses(graph)
    held: list[_Buffer] = []
    tokens = 0
    for place, node in enumerate(graph.nodes):
        made = [_buffer(each, uses[each], scale) for each in _results(node)]
        if node.op == "placeholder":
            held += made
            # All that was saved is counted as it is; the gradient that comes in is not.
            if "tangent" in node.name:
                tokens += sum(buffer.token_bytes for buffer in made)
            continue
        for buffer in made:
            over = _written_over(held, buffer, place) if is_written(node) else None
            if over is not None:
                held.remove(over)
                tokens -= over.token_bytes
            held.append(buffer)
            tokens += buffer.token_bytes
        yield tokens
        for each in [each for each in held if each.ends <= place]:
            held.remove(each)
            tokens -= each.token_bytes


def _results(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory this one takes."""
    if node.op == "placeholder" or is_written(node):
        found = [node]
    elif node.op == "call_function" and stands_alone(node):
        found = results_of(node)
    else:
        found = []
    return [each for each in found if isinstance(each.meta.get("val"), Tensor)]


def _buffer(node: fx.Node, ends: int, scale: Scale) -> _Buffer:
    result = node.meta["val"]
    size = round(scale.bytes(result, result.numel()))
    return _Buffer(size, ends, is_saved=node.op == "placeholder")


def _last_uses(graph: fx.Graph) -> dict[fx.Node, int]:
    """The place of the last kernel that needs each node: through views, and through operators that
    are computed where their result is needed."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        uses = [places[node]]
        for user in node.users:
            if user.op == "output":
                uses.append(len(places))
            else:
                is_kernel = stands_alone(user) or is_written(user)
                uses.append(places[user] if is_kernel else last[user])
        last[node] = max(uses)
    return last


def _written_over(held: list[_Buffer], buffer: _Buffer, place: int) -> _Buffer | None:
    """A tensor of backward that a fused kernel may write over. What was saved stays as it is: it is
    often read in another order than the result is written."""
    for each in held:
        fits = each.ends == place and each.token_bytes == buffer.token_bytes
        if fits and not each.is_saved:
            return each
    return None
