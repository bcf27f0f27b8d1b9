"""torch.compile, module by module. Blocks share one graph, which is compiled once for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

# torch.compile's public options take a pass of this class, which no public module has. A plain
# function would do, but its compiled code is not cached from run to run.
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from shardwise.model.override import override_forward
from shardwise.parallel import remat

_ATEN = torch.ops.aten
_VIEWS = frozenset({_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default})


def apply_compile(modules: list[nn.Module]) -> None:
    """Compile each module's forward, inside the hooks that FSDP2 puts around it."""
    # Routers store their logits as a side effect. In a recomputed block torch.compile allows that
    # only if it is told that the recomputation need not repeat it. No public setting says so.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    override_forward(modules, "Compiled", _compiled)


def _compiled(cls: type[nn.Module]) -> Callable[..., Any]:
    # Shapes are fixed in training; a dynamic graph would be slower.
    compiled: Callable[..., Any] = torch.compile(
        cls.forward, dynamic=False, options={"joint_custom_post_pass": KeepSums()}
    )
    return compiled


class KeepSums(CustomGraphPass):
    """Save the residual stream for backward instead of what a layer has added to it.

    Both are as many bytes. Left to itself, the compiler saves what was added; then each kernel of
    backward that needs the sum reads two tensors and adds them again.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Mark the sums of the joint graph. In backward a mark changes nothing."""
        for node in graph.find_nodes(op="call_function", target=_ATEN.add.Tensor):
            # Where recompute is on, it has marked every node already.
            if "recompute" not in node.meta and any(map(_is_product, node.args)):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> Any:
        """The key of this pass in the compiler's cache."""
        return get_hash_for_files((__file__, remat.__file__))


def _is_product(node: Any) -> bool:
    """Whether this is the result of a matmul that nothing else reads: it need not be saved where
    its sum is."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    return node.target in remat.MATMULS or (node.target in _VIEWS and _is_product(node.args[0]))
