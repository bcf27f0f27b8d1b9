"""Which settings go together with experts that are dealt out to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.models import ModelSpec
from shardwise.plan.axis_sizes import given_axes

# Those that were compared with one process. Others may compute something else between two matmuls,
# or call experts in another way.
FAMILIES = (
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe"),
    *("olmoe", "qwen2_moe", "deepseek_v2", "dots1", "ernie4_5_moe", "glm4_moe_lite"),
    *("granitemoe", "phimoe", "minimax_m2", "hunyuan_v1_moe", "flex_olmo", "jamba"),
)


def check_expert(
    config: RunConfig, model: ModelSpec, hf_config: Mapping[str, Any]
) -> Iterator[UserError]:
    """What forbids to deal the experts out, one error for each."""
    size = given_axes(config.mesh).expert
    if size == 1:
        return
    if model.model_type not in FAMILIES or config.model.trust_remote_code:
        yield UserError(
            f"mesh.expert={size} does not suit {model.model_type} models",
            why=f"experts were compared with one process for {', '.join(FAMILIES)}",
            fix="write mesh.expert=1: every rank gathers all experts of a block",
        )
    reshard = config.shard.reshard_after_forward
    if reshard != "auto" and not isinstance(reshard, bool):
        yield UserError(
            f"mesh.expert={size} does not work with shard.reshard_after_forward={reshard}",
            why="experts are gathered from other ranks than the rest of their block, so there is "
            "no smaller group for both",
            fix="write shard.reshard_after_forward=true, or shard.reshard_after_forward=false",
        )
    tensor = config.mesh.tensor
    if tensor not in (1, "auto") and not config.mesh.sequence_parallel:
        yield UserError(
            f"mesh.expert={size} does not work with mesh.sequence_parallel=false",
            why=f"{tensor} ranks along `tensor` would send the same tokens to experts",
            fix="leave mesh.sequence_parallel out, or write mesh.expert=1",
        )
