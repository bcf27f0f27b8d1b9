"""What the host takes for a block, which no step can be faster than.

It launches the kernels of the block, and runs what Python adds: FSDP2's hooks for each parameter of
a unit, and operators of ours that make packed weights usable. All of it is counted in launches, so
that a machine whose launches were measured has figures of its own.
"""

from __future__ import annotations

from shardwise.facts.block_kind import way_of
from shardwise.facts.block_work import Matmul, Work
from shardwise.facts.flops import recomputed_share
from shardwise.facts.models import ModelSpec
from shardwise.facts.rates import Rates
from shardwise.plan.block_time import runs_float8
from shardwise.plan.decisions import Decisions
from shardwise.plan.software import Software
from shardwise.plan.unit_sizes import uses_in_place

# Kernels that are counted of a Llama's block, forward and backward, compiled and not, by what is
# recomputed (of SmolLM3's, which has the same operators). `Software` has the launches of such a
# block, and another is to it as its kernels are.
LLAMA_KERNELS = {
    True: {"none": 34, "selective": 37, "full": 44},
    False: {"none": 109, "selective": 127, "full": 145},
}
_LLAMA_MATMULS, _NORMS = 7, 2


def host_seconds(model: ModelSpec, decided: Decisions, rates: Rates, software: Software) -> float:
    """The host's seconds for one block's micro-batch, forward and backward: the mean of all."""
    works = [(kind.count, kind.work) for kind in model.kinds]
    if not works:
        return _launches(model, None, decided, software) * rates.launch_s
    blocks = sum(count for count, _ in works)
    launches = sum(count * _launches(model, work, decided, software) for count, work in works)
    return launches / blocks * rates.launch_s


def _launches(model: ModelSpec, work: Work | None, decided: Decisions, software: Software) -> float:
    """Those of a block with this work, or of a Llama's."""
    llama = software.block_kernels * (1 if decided.compile else 2)
    known = LLAMA_KERNELS[decided.compile]
    kernels = _kernels(model, work, decided, software) / known["none"]
    return (
        llama * kernels
        + software.tensor_launches * _tensors(model, work, decided)
        + software.unpack_launches * _unpacked(model, work, decided)
    )


def _kernels(model: ModelSpec, work: Work | None, decided: Decisions, software: Software) -> float:
    """Kernels of a block, with those that are launched again."""
    known = LLAMA_KERNELS[decided.compile]
    own = decided.own_kernels and not runs_float8(model, decided, software)

    def of(mode: str) -> float:
        way = way_of(compiled=decided.compile, own_kernels=own, recompute=mode)
        if work is None:
            return known[mode]
        if way in work.passes:
            return work.passes[way].kernels
        plain = way_of(compiled=decided.compile, own_kernels=own)
        return work.passes[plain].kernels * known[mode] / known["none"]

    # Where nothing overlaps, recomputation is counted by its own time.
    if decided.checkpoint_activations == "none" or not software.overlaps:
        return of("none")
    if decided.checkpoint_activations == "selective":
        return of("selective")
    share = recomputed_share(decided.checkpoint_activations)
    return share * of("full") + (1 - share) * of("none")


def _tensors(model: ModelSpec, work: Work | None, decided: Decisions) -> float:
    """The parameters of a block that FSDP2 handles one by one."""
    own = _num_base(model, work) + _NORMS
    if model.adapter is None:
        return own
    added = 2 * model.adapter.num_layers / model.num_layers
    return added if uses_in_place(model, decided) else added + own


def _unpacked(model: ModelSpec, work: Work | None, decided: Decisions) -> float:
    """How often a micro-batch uses packed weights of a block."""
    if model.adapter is None or not model.adapter.packed_params:
        return 0.0
    again = recomputed_share(decided.checkpoint_activations)
    counted = model.adapter.packed_tensors / model.num_layers
    return (counted or _num_base(model, work)) * (2 + again)


def _num_base(model: ModelSpec, work: Work | None) -> int:
    """Matmuls of a block that are not those of adapters."""
    if work is None:
        return _LLAMA_MATMULS
    rank = model.adapter.rank if model.adapter else None

    def is_base(matmul: Matmul) -> bool:
        return rank not in (matmul.inner, matmul.width)

    return sum(matmul.count for matmul in work.matmuls if is_base(matmul))
