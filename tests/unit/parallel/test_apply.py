"""The order in which a model is changed."""

from __future__ import annotations

import pytest

from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.tunnel.emulate import Emulator
from shardwise.tunnel.link_clock import HostClock
from shardwise.tunnel.links import Links
from shardwise.tunnel.rank import plan_on, shard_rank
from shardwise.tunnel.world import rank_zero_of

MIXTURE = "model={name: tiny-mixtral, overrides: {num_local_experts: 4}}"


@pytest.mark.parametrize(("experts", "inner"), [(1, "Remat"), (2, "Compiled")])
def test_blocks_are_compiled_inside_a_checkpoint_where_their_graph_is_cut(
    experts: int, inner: str
) -> None:
    """The compiler traces no checkpoint with a cut in it: it left such blocks as they were."""
    settings = (MIXTURE, "cluster=2xCPU", "data.seq_len=16", f"mesh.expert={experts}")
    settings += ("memory.checkpoint_activations=full", "memory.compile=true", "mesh.shard=2")
    plan = choose_plan(load_config(None, settings), {})
    emulator = Emulator(Links.of(plan.cluster.fabric), HostClock(), free=True)
    with rank_zero_of(2):
        shell = shard_rank(plan_on(plan, "cpu", compiled=True), emulator)
    names = [cls.__name__ for cls in type(shell.model.model.layers[0]).__mro__]
    # What is changed last comes first.
    made = [word for name in names for word in ("Remat", "Compiled") if name.startswith(word)]
    made = [word for n, word in enumerate(made) if word not in made[:n]]
    assert (made[-1], len(made)) == (inner, 2), names
