"""The compiler's graphs of a module."""

from __future__ import annotations

import torch
from torch import fx

from shardwise.internals.graphs import Graphs, noting_backend


def test_graphs_of_forward_and_backward_are_noted() -> None:
    graphs, joint = Graphs(), list[fx.Graph]()
    layer = torch.nn.Linear(4, 4, bias=False)
    torch.compiler.reset()
    run = torch.compile(layer, backend=noting_backend(graphs, joint.append), dynamic=False)
    x = torch.ones(2, 4, requires_grad=True)
    result = torch.sigmoid(run(x))
    result.sum().backward()
    assert torch.equal(result, torch.sigmoid(layer(x)))
    assert x.grad is not None and layer.weight.grad is not None
    assert len(graphs.forward) == len(graphs.backward) == len(joint) == 1
    for graph, products in ((graphs.forward[0], 1), (graphs.backward[0], 2)):
        found = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        assert len(found) == products
        assert all(node.meta["val"].shape for node in found)


def test_what_is_saved_has_one_name_in_both_graphs() -> None:
    graphs = Graphs()
    torch.compiler.reset()
    run = torch.compile(
        lambda x: torch.sigmoid(x @ x), backend=noting_backend(graphs, None), dynamic=False
    )
    run(torch.ones(4, 4, requires_grad=True))
    (output,) = graphs.forward[0].find_nodes(op="output")
    made = {node.name for node in output.all_input_nodes}
    taken = {node.name for node in graphs.backward[0].find_nodes(op="placeholder")}
    assert made & taken
