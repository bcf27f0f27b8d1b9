"""Sequences longer than the model has positions for are refused, or get a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.models import ModelSpec

# Names of the table's length in config.json.
_TABLE_LENGTHS = ("n_positions", "max_position_embeddings", "max_seq_len")


def validate_positions(
    config: RunConfig, model: ModelSpec, hf_config: Mapping[str, Any], *, pretrained: bool
) -> None:
    """Raise where positions are a table that ends before the sequence does, or where pretrained
    weights have never seen positions that far out."""
    limit, seq_len = model.max_positions, config.data.seq_len
    if limit is None or seq_len <= limit:
        return
    if model.position_table:
        field = next((name for name in _TABLE_LENGTHS if name in hf_config), None)
        longer = f", or model.overrides.{field}={seq_len}" if field and not pretrained else ""
        raise UserError(
            f"data.seq_len is {seq_len}, and {model.name} has {limit} positions",
            why="its positions are a table that has no row for a token beyond its end",
            fix=f"data.seq_len={limit}{longer}",
        )
    if pretrained:
        raise UserError(
            f"data.seq_len is {seq_len}, and the weights of {model.name} are made for {limit} "
            "positions",
            why="max_position_embeddings and the rope scaling of its config.json say so",
            fix=f"data.seq_len={limit}; or, to train these weights on longer sequences, "
            f"model.overrides.max_position_embeddings={seq_len}, with "
            "model.overrides.rope_scaling where positions are to be scaled",
        )


def warn_of_positions(config: RunConfig, model: ModelSpec) -> list[str]:
    """The warning for sequences that are longer than the model says it is made for."""
    limit, seq_len = model.max_positions, config.data.seq_len
    if limit is None or seq_len <= limit:
        return []
    return [
        f"data.seq_len is {seq_len}, and the config.json of {model.name} names {limit} positions; "
        f"model.overrides.max_position_embeddings={seq_len} confirms longer sequences"
    ]
