"""Passes over the compiler's graphs, and one setting of it.

torch.compile takes a pass by the option `joint_custom_post_pass`. It also takes a plain function,
but then its results are not cached from run to run, because it cannot tell whether the function has
changed. `CustomGraphPass` tells it by a `uuid`, here a hash of source files.
"""

from __future__ import annotations

from typing import Any

import torch._dynamo
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

__all__ = ["CustomGraphPass", "allow_side_effects", "get_hash_for_files"]


def allow_side_effects() -> None:
    """Let a block that is recomputed keep something on the side, as routers keep their logits. The
    compiler allows that only where it is told that the recomputation need not do it again."""
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def check_passes() -> Any:
    """The option that takes a pass."""
    import torch._inductor.config

    return torch._inductor.config.joint_custom_post_pass
