"""How a plan shards: units, meshes, and communication that nothing hides."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.check import Check
from shardwise.plan.decisions import DTYPE_BYTES
from shardwise.plan.planned import Plan
from shardwise.plan.rank_share import num_shards
from shardwise.plan.unit_sizes import gathered_sizes
from shardwise.units import format_bytes, format_count

# Units below this share of a block are gathered in messages that are too small for the links.
_SMALL_UNIT = 0.25
# FSDP2 holds the unit in use and the one that is gathered ahead.
_UNITS_HELD = 2
_MUCH_MEMORY = 0.20
_MUCH_EXPOSED = 0.10
# All-gathers over more ranks wait for latency.
_MANY_RANKS = 512


def _exposed_share(plan: Plan) -> float:
    forecast = plan.forecast
    return 0.0 if forecast is None else forecast.terms["exposed"] / forecast.step_s


def _is_sharded(plan: Plan) -> bool:
    return num_shards(plan.decided) > 1


def _ranks_of_copy(plan: Plan) -> int:
    """Ranks that one copy of the model lies on: neighbours."""
    return num_shards(plan.decided) * plan.decided.tensor


def _root_only(plan: Plan) -> Iterator[str]:
    least, model = plan.config.shard.unit_min_params, plan.model
    if least is not None and least > model.block_params and model.num_layers > 1:
        yield (
            f"shard.unit_min_params={least} is more than the {format_count(model.block_params)} "
            f"parameters of a block, so that none of the {model.num_layers} blocks is a unit"
        )


def _small_units(plan: Plan) -> Iterator[str]:
    least, block = plan.config.shard.unit_min_params, plan.model.block_params
    if least is not None and least < _SMALL_UNIT * block and _is_sharded(plan):
        yield (
            f"shard.unit_min_params={least}: a block of {format_count(block)} parameters is "
            f"gathered in up to {block // max(1, least)} parts"
        )


def _large_units(plan: Plan) -> Iterator[str]:
    sizes = gathered_sizes(plan.model, plan.decided)
    largest = max(sizes.block, sizes.head, sizes.table)
    held = _UNITS_HELD * largest * DTYPE_BYTES[plan.decided.param_dtype]
    if _is_sharded(plan) and held > _MUCH_MEMORY * plan.cluster.memory_bytes:
        yield (
            f"two units of {format_count(largest)} parameters take {format_bytes(held)} of "
            f"{format_bytes(plan.cluster.memory_bytes)} while they are gathered"
        )


def _flat_across_nodes(plan: Plan) -> Iterator[str]:
    ranks, domain, share = _ranks_of_copy(plan), plan.cluster.nvlink_domain, _exposed_share(plan)
    if _is_sharded(plan) and ranks > domain and share > _MUCH_EXPOSED:
        yield (
            f"each unit is gathered over {num_shards(plan.decided)} ranks of {-(-ranks // domain)} "
            f"domains, and {share:.0%} of a step is expected to be exposed communication"
        )


def _off_the_domain(plan: Plan) -> Iterator[str]:
    ranks, domain, copies = _ranks_of_copy(plan), plan.cluster.nvlink_domain, plan.decided.replicate
    large, small = max(ranks, domain), min(ranks, domain)
    if copies == 1 or ranks == 1:
        return
    if large % small:
        yield (
            f"the {ranks} ranks of a copy and the {domain} devices of a domain do not divide each "
            "other"
        )
    elif ranks > domain and plan.choices["shard"].source == "user":
        yield (
            f"the {ranks} ranks of a copy span {ranks // domain} domains of {domain} devices, "
            f"beside replicate={copies}"
        )


def _no_overlap(plan: Plan) -> Iterator[str]:
    shard = plan.config.shard
    if not _is_sharded(plan):
        return
    if shard.all_gather_limit == 1:
        yield "shard.all_gather_limit=1 lets no unit be gathered while another computes"
    elif shard.backward_prefetch == 0:
        yield "shard.backward_prefetch=0 gathers a unit only when backward needs it"


def _too_little_compute(plan: Plan) -> Iterator[str]:
    decided, share = plan.decided, _exposed_share(plan)
    within = _ranks_of_copy(plan) <= plan.cluster.nvlink_domain
    if plan.forecast is None or not within or share <= _MUCH_EXPOSED:
        return
    yield (
        f"{format_count(decided.tokens)} tokens in a micro-batch, where "
        f"{format_count(plan.forecast.tokens_to_hide)} hide the collectives: {share:.0%} of a step "
        "is expected to be exposed"
    )


def _many_ranks(plan: Plan) -> Iterator[str]:
    ranks = num_shards(plan.decided)
    if ranks > _MANY_RANKS:
        yield f"one copy of the model is sharded over {ranks} ranks"


SHARDING: tuple[Check[Plan], ...] = (
    Check(
        "SW101", "error", "Only the root is a unit",
        "The whole model is then gathered at once: it does not fit, and nothing overlaps.",
        "leave shard.unit_min_params out: blocks become units",
        _root_only,
    ),
    Check(
        "SW102", "warning", "Units are too small",
        "Each all-gather has a latency. Small messages do not reach the bandwidth of the links.",
        "leave shard.unit_min_params out: one unit for each block is the usual size",
        _small_units,
    ),
    Check(
        "SW103", "warning", "Units are too large",
        "The unit in use and the next one are whole on every rank, beside everything else.",
        "name smaller modules with shard.unit_classes, or plan for devices with more memory",
        _large_units,
    ),
    Check(
        "SW104", "warning", "Units are gathered across nodes",
        "Every unit crosses the network twice in each pass. With HSDP only gradients cross it.",
        "write shard.strategy=hybrid_shard, or shard.strategy=auto; larger micro-batches hide more",
        _flat_across_nodes,
    ),
    Check(
        "SW105", "warning", "The shard axis does not match the NVLink domain",
        "A shard group that leaves its domain gathers over the network, as 1-D sharding does.",
        "write mesh.shard=auto, or the number of GPUs of a domain; cluster.nvlink_domain says it",
        _off_the_domain,
    ),
    Check(
        "SW106", "warning", "All-gathers are not overlapped with compute",
        "The GPUs are idle during each all-gather, which looks like low MFU on healthy links.",
        "leave shard.all_gather_limit and shard.backward_prefetch out",
        _no_overlap,
    ),
    Check(
        "SW107", "warning", "A micro-batch computes too little to hide its collectives",
        "Collectives take the same time for one sequence as for many.",
        "raise train.micro_batch or data.seq_len, or use fewer ranks",
        _too_little_compute,
    ),
    Check(
        "SW108", "warning", "The shard group is very large",
        "A ring over so many ranks spends its time on latency, and each rank's part is small.",
        "write shard.strategy=hybrid_shard: replicas of smaller groups",
        _many_ranks,
    ),
)  # fmt: skip
