"""How parameters are all-gathered: how far ahead, into which memory, in which format, kept or
not."""

from __future__ import annotations

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import Choice, Choices
from shardwise.plan.float8_rules import choose_float8_gather
from shardwise.plan.given import decide
from shardwise.plan.stage_cuts import splits_backward
from shardwise.plan.strategy_mesh import MeshShape


def choose_gathers(
    config: RunConfig, model: ModelSpec, mesh: MeshShape, *, own_kernels: bool
) -> Choices:
    """All decisions about all-gathers that follow from a mesh."""
    in_place = _choose_gather_in_place(config, mesh, own_kernels=own_kernels)
    forward, backward = _choose_prefetch(config, mesh, in_place.value)
    return {
        "reshard_after_forward": choose_reshard(config, mesh),
        "forward_prefetch": forward,
        "backward_prefetch": backward,
        "float8_gather": choose_float8_gather(config, model, mesh.num_shards),
        "gather_in_place": in_place,
    }


def choose_reshard(config: RunConfig, mesh: MeshShape) -> Choice[bool | int]:
    """What happens to gathered parameters after forward."""
    if config.shard.reshard_after_forward != "auto" and not reshard_divides(config, mesh):
        raise reshard_error(config, mesh.num_shards)
    if splits_backward(config):
        why = "zero_bubble computes gradients of weights from what is still gathered"
        return Choice(False, why, "rule")
    if mesh.reshard_after_forward:
        why = "frees gathered parameters, which backward gathers again"
    else:
        why = "keeps gathered parameters for backward: one all-gather less"
    return decide(config, "reshard_after_forward", mesh.reshard_after_forward, why)


def reshard_divides(config: RunConfig, mesh: MeshShape) -> bool:
    """Whether a given integer splits the shard axis into equal groups."""
    given = config.shard.reshard_after_forward
    if given == "auto" or isinstance(given, bool):
        return True
    return given < mesh.num_shards and mesh.num_shards % given == 0


def reshard_error(config: RunConfig, ranks: int) -> UserError:
    """The error for an integer that does not divide it."""
    smaller = max((size for size in range(2, ranks) if ranks % size == 0), default=None)
    groups = [*([] if smaller is None else [f"{smaller}"]), "true", "false"]
    return UserError(
        f"shard.reshard_after_forward={config.shard.reshard_after_forward} does not divide the "
        f"shard axis of {ranks} ranks into smaller groups",
        fix=f"write {', or '.join(f'shard.reshard_after_forward={group}' for group in groups)}",
    )


def _choose_gather_in_place(
    config: RunConfig, mesh: MeshShape, *, own_kernels: bool
) -> Choice[bool]:
    """Whether all-gathers write into the parameters' own memory."""
    shard, reshard = config.shard, choose_reshard(config, mesh).value
    if shard.gather_in_place != "auto":
        if shard.gather_in_place and not isinstance(reshard, bool):
            raise UserError(
                f"shard.gather_in_place does not work with shard.reshard_after_forward={reshard}",
                why="backward gathers from fewer ranks than forward, with other shards",
                fix="leave shard.gather_in_place out, or write shard.reshard_after_forward=true, "
                "or shard.reshard_after_forward=false",
            )
        return Choice(shard.gather_in_place, "given", "user")
    if mesh.pipeline > 1:
        why = "several micro-batches use a block's parameters between two gathers"
        return Choice(False, why, "rule")
    if mesh.num_shards == 1:
        return Choice(False, "nothing is gathered", "rule")
    if not isinstance(reshard, bool):
        return Choice(False, "backward gathers from fewer ranks than forward", "rule")
    if shard.forward_prefetch == 0 or shard.all_gather_limit == 1:
        return Choice(
            False, "an all-gather in place is hidden only if units are gathered ahead", "rule"
        )
    if not own_kernels:
        return Choice(False, "it was measured with our own kernels only", "rule")
    return Choice(
        True, "all-gathers write into parameters, so no copy out of a buffer follows", "rule"
    )


def _choose_prefetch(
    config: RunConfig, mesh: MeshShape, in_place: bool
) -> tuple[Choice[int], Choice[int]]:
    shard = config.shard
    limit = None if shard.all_gather_limit == "auto" else shard.all_gather_limit - 1
    first = (0, "FSDP2 overlaps the next all-gather by itself")
    if mesh.expert > 1:
        first = (1, "the host waits in each block for the number of rows that experts get")
    if in_place:
        first = (1, "all-gathers in place are hidden if they start one unit ahead")
    forward = decide(config, "forward_prefetch", *first)
    backward = decide(config, "backward_prefetch", 1, "FSDP2's own order, one unit ahead")
    return _cap(forward, limit), _cap(backward, limit)


def _cap(depth: Choice[int], limit: int | None) -> Choice[int]:
    if limit is None or depth.value <= limit:
        return depth
    return Choice(limit, f"capped by shard.all_gather_limit={limit + 1}", "user")
