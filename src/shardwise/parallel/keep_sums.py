"""A pass over compiled graphs: which of two tensors of one size forward keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from shardwise.internals.inductor import CustomGraphPass, get_hash_for_files
from shardwise.parallel import remat

_ATEN = torch.ops.aten
_VIEWS = frozenset({_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default})


class KeepSums(CustomGraphPass):
    """Save the residual stream for backward instead of what a layer has added to it.

    Both are as many bytes. Left to itself, the compiler saves what was added; then each kernel of
    backward that needs the sum reads two tensors and adds them again.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Mark the sums of the joint graph. In backward a mark changes nothing."""
        for node in graph.find_nodes(op="call_function", target=_ATEN.add.Tensor):
            # Where recompute is on, it has marked every node already.
            if "recompute" in node.meta or _is_adapted(node):
                continue
            if any(map(_is_product, node.args)):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> Any:
        """The key of this pass in the compiler's cache."""
        return get_hash_for_files((__file__, remat.__file__))


def _is_product(node: Any) -> bool:
    """Whether this is the result of a layer that nothing else reads: it need not be saved where its
    sum is."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    if node.target in _VIEWS:
        return _is_product(node.args[0])
    return node.target in remat.MATMULS or _is_adapted(node)


def _is_adapted(node: fx.Node) -> bool:
    """Whether this is what a layer and its adapter come to."""
    is_sum = node.target == _ATEN.add.Tensor
    return is_sum and all(map(_is_product, node.args))
