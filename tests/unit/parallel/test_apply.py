"""The order in which a model is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.launch.prepare import choose_plan
from shardwise.parallel.apply import parallelize
from shardwise.parallel.mesh import build_mesh
from shardwise.tunnel.emulate import Emulator
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.link_clock import HostClock
from shardwise.tunnel.rank_zero import plan_on, shard_rank
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


def test_a_part_of_a_block_that_may_mix_tokens_is_not_divided() -> None:
    """Ranks along `tensor` hold parts of the tokens between modules."""
    settings = ("model=tiny-llama", "cluster=2xCPU", "data.seq_len=16", "mesh.tensor=2")
    plan = choose_plan(load_config(None, settings), {})
    fields = {name: value for name, value in plan.hf_config.items() if name != "model_type"}
    config = AutoConfig.for_model(plan.hf_config["model_type"], **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model.model.layers[0].mixer = nn.Conv1d(4, 4, 3)
    with rank_zero_of(2), pytest.raises(UserError) as refused:
        parallelize(model, plan, build_mesh(plan))
    assert "nothing is known about Conv1d, a part of its blocks" in str(refused.value)
    assert "fix: write mesh.tensor=1" in str(refused.value)
