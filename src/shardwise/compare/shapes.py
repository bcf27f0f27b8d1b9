"""A model's shape from the sizes that tables of runs have, which leave some things open."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.facts.models import ModelSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """A reading of a row's sizes."""

    model: ModelSpec
    gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int


def read_shape(*, stated_params: float | None, **sizes: int) -> Shape:
    """The reading that comes nearest to the stated number of parameters.

    Open are: a gated feed-forward (three matrices) or a plain one (two), a head of its own or the
    embedding's, learned positions, heads of 128 channels whatever the width. Counts are exact to a
    thousandth where they are right, so the nearest is not a matter of taste. Without a stated
    number it is the commonest: gated, a head of its own.
    """
    readings = _readings(_Sizes(**sizes))
    if stated_params is None:
        return next(readings)
    return min(readings, key=lambda shape: abs(shape.model.total_params - stated_params))


def _readings(sizes: _Sizes) -> Iterator[Shape]:
    widths = dict.fromkeys((max(1, sizes.hidden // sizes.heads), 128))
    options = itertools.product(widths, (True, False), (False, True), (0, sizes.positions))
    for width, gated, tied, positions in options:
        yield Shape(_spec(sizes, width, gated, tied, positions), gated)


def _spec(sizes: _Sizes, width: int, gated: bool, tied: bool, positions: int) -> ModelSpec:
    attention = sizes.hidden * width * 2 * (sizes.heads + sizes.kv_heads)
    matmuls = attention + (3 if gated else 2) * sizes.hidden * sizes.ffn
    block = matmuls + 2 * sizes.hidden
    head = sizes.vocab * sizes.hidden
    embedding = head + positions * sizes.hidden
    tail = sizes.hidden + (0 if tied else head)
    return ModelSpec(
        name="published",
        model_type="llama" if gated else "gpt2",
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=width,
        ffn_size=sizes.ffn,
        vocab_size=sizes.vocab,
        tied_embeddings=tied,
        embedding_params=embedding,
        block_params=block,
        tail_params=tail,
        total_params=embedding + sizes.layers * block + tail,
        matmul_params_per_token=sizes.layers * matmuls + head,
        source="counted",
    )
