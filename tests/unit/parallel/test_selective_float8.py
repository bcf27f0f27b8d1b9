"""What selective checkpointing does twice of float8 layers, read off the compiler's graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from shardwise.parallel.float8_linear import Float8GatedMLP, Linear
from shardwise.parallel.remat import apply_remat


class Block(nn.Module):
    """What follows attention, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((64, 64), (128, 64), (128, 64), (64, 128))
        self.weights = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        output, *mlp = self.weights
        y: Tensor = Float8GatedMLP.apply(Linear.apply(x, output, True), *mlp)
        return y


def calls_of(block: nn.Module) -> dict[str, Counter[str]]:
    """Operators of the forward graph and of the backward graph."""
    found: dict[str, Counter[str]] = {}

    def reader(name: str) -> Any:
        def read(graph: torch.fx.GraphModule, _: Any) -> Any:
            found[name] = Counter(str(node.target) for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return read

    backend = aot_autograd(
        fw_compiler=reader("forward"),
        bw_compiler=reader("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled = torch.compile(block, backend=backend)
    compiled(torch.randn(32, 64, requires_grad=True)).sum().backward()
    return found


def test_largest_values_are_not_looked_for_twice() -> None:
    block = Block()
    apply_remat([block], "selective")
    found = calls_of(block)
    assert found["forward"]["shardwise.swiglu_amax.default"] == 1
    assert found["backward"]["shardwise.swiglu_amax.default"] == 0
    assert found["forward"]["shardwise.amax.default"] == 1
    # Those of two gradients.
    assert found["backward"]["shardwise.amax.default"] == 2
    # Matmuls: both gradients of four layers, and none again.
    assert found["backward"]["aten.mm.default"] == 8
