"""The graphs that torch.compile makes of a module, as they are before they become kernels.

A backend of torch.compile is public. What cuts a graph into forward and backward, and takes
operators apart as the compiler's default backend does, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardwise.internals.parts import no_public_path

try:
    from functorch.compile import (  # type: ignore[import-untyped]
        make_boxed_func,
        min_cut_rematerialization_partition,
    )
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._inductor.compile_fx import select_decomp_table
except ImportError as error:
    raise no_public_path("torch", "counting a model's work", error) from error


@dataclass(slots=True)
class Graphs:
    """The graphs of one call. Several where the compiler cannot trace it in one piece."""

    forward: list[fx.Graph] = field(default_factory=list)
    backward: list[fx.Graph] = field(default_factory=list)


def noting_backend(graphs: Graphs, change: Callable[[fx.Graph], None] | None) -> Any:
    """A backend that notes graphs, and runs them as they are. `change` sees the graph of forward
    and backward together before it is cut."""

    def cut(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if change is not None:
            change(joint.graph)
        options["compiler"] = "inductor"
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        graphs.backward.append(backward.graph)
        return forward, backward

    def note(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.forward.append(module.graph)
        return make_boxed_func(module)

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        with config.patch({"unlift_effect_tokens": True}):
            return aot_autograd(
                fw_compiler=note,
                bw_compiler=lambda module, inputs: make_boxed_func(module),
                decompositions=select_decomp_table,
                partition_fn=cut,
            )(module, inputs)

    return backend
