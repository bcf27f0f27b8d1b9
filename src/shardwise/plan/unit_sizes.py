"""The parameters of units: those that are gathered, and those that have gradients."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.facts.models import ModelSpec
from shardwise.plan.decisions import DTYPE_BYTES, Decisions, multiplies_base, multiplies_experts
from shardwise.plan.rank_share import block_share, model_share, num_shards


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """One number of parameters for each kind of unit."""

    block: int
    head: int
    table: int
    """The embedding."""


def head_params(model: ModelSpec, decided: Decisions) -> int:
    """Those of the head, tied or not. The tensor axis cuts its vocabulary."""
    return model.vocab_size * model.hidden_size // decided.tensor


def table_params(model: ModelSpec, decided: Decisions) -> int:
    """Those of the embedding, which is cut likewise."""
    return model.embedding_params // decided.tensor


def gathered_sizes(model: ModelSpec, decided: Decisions) -> UnitSizes:
    """What a rank gathers for each unit, in numbers of the format that it computes with. Frozen
    weights that every rank has whole are used where they are."""
    adapters = 0 if model.adapter is None else model.adapter.largest_unit
    if uses_in_place(model, decided):
        return trained_sizes(model, decided)
    block = block_share(model, decided) + adapters
    block -= _spared(model, decided) // model.num_layers
    return UnitSizes(block, head_params(model, decided), table_params(model, decided))


def gathered_total(model: ModelSpec, decided: Decisions) -> int:
    """The same for the whole model."""
    if model.adapter is None:
        return model_share(model, decided)
    if uses_in_place(model, decided):
        return model.adapter.num_params
    added = model.adapter.num_params - model.adapter.whole_params
    return added + model_share(model, decided) - _spared(model, decided)


def frozen_bytes(model: ModelSpec, decided: Decisions) -> int:
    """Bytes of a rank's frozen weights. Those that are not packed are stored as they are computed
    with."""
    if model.adapter is None:
        return 0
    kept = model.total_params - model.adapter.whole_params - _spared(model, decided)
    return -(-kept // (decided.tensor * num_shards(decided))) * DTYPE_BYTES[decided.param_dtype]


def unpacked_bytes(model: ModelSpec, decided: Decisions) -> int:
    """Bytes of what a layer makes of its weight, and frees when it is done: floats of a packed one.
    A layer that multiplies a float8 base transposes its bytes; packed experts are made floats in
    any case. Experts in float8 cast a stack, or the rows that go in and out of it."""
    if multiplies_experts(decided):
        stack = 2 * model.expert_params // 3 // decided.expert
        channels = model.hidden_size + 2 * model.ffn_size
        return max(stack, decided.tokens * model.experts_per_token * channels)
    largest = 0 if model.adapter is None else model.adapter.largest_packed
    if multiplies_base(decided) and model.num_experts == 1:
        return largest
    return largest * DTYPE_BYTES[decided.param_dtype]


def _spared(model: ModelSpec, decided: Decisions) -> int:
    """By how many numbers of the format that it computes with packed weights are smaller."""
    if model.adapter is None:
        return 0
    width = DTYPE_BYTES[decided.param_dtype]
    return model.adapter.packed_params - -(-model.adapter.packed_bytes // width)


def trained_sizes(model: ModelSpec, decided: Decisions) -> UnitSizes:
    """What has gradients in each unit."""
    if model.adapter is not None:
        return UnitSizes(model.adapter.largest_unit, model.adapter.head, model.adapter.table)
    block = block_share(model, decided)
    return UnitSizes(block, head_params(model, decided), table_params(model, decided))


def uses_in_place(model: ModelSpec, decided: Decisions) -> bool:
    """Whether frozen weights lie whole on every rank, and are left out of FSDP2: there is nothing
    to gather, and no gradient to reduce."""
    return model.adapter is not None and num_shards(decided) == 1 and not decided.offload
