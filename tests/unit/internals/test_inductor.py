"""Passes over the compiler's graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.internals.inductor import CustomGraphPass, allow_side_effects, get_hash_for_files


class Look(CustomGraphPass):
    """Notes the operators of each graph."""

    seen: list[str]

    def __init__(self) -> None:
        self.seen = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen += [str(node.target) for node in graph.nodes if node.op == "call_function"]

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def test_a_pass_is_told_apart_by_its_source() -> None:
    assert Look().uuid() == Look().uuid() == get_hash_for_files((__file__,))
    assert Look().uuid() != get_hash_for_files((torch.__file__,))


def test_the_compiler_has_the_option_that_takes_a_pass() -> None:
    """It is refused where it is not there; compiling with it takes a C++ compiler and seconds."""
    look = Look()
    compiled = torch.compile(lambda x: x, options={"joint_custom_post_pass": look})
    assert callable(compiled)


def test_the_compiler_has_the_setting_for_side_effects() -> None:
    allow_side_effects()
    assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint is True
