"""The format of frozen weights: the one that was asked for, or that of the model's files."""

from __future__ import annotations

from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.errors import UserError
from shardwise.facts.adapter_sizes import BASE_NAMES
from shardwise.facts.config_source import ModelSource
from shardwise.facts.fp8_block_size import BLOCK
from shardwise.facts.models import ModelSpec
from shardwise.facts.quantization import (
    FP8,
    MXFP4,
    Quantization,
    quantization_in,
    read_quantization,
)
from shardwise.facts.weight_files import stored_names
from shardwise.plan.axis_sizes import given_axes
from shardwise.plan.decisions import Choice

SHIPPED = (MXFP4, FP8)
"""The values of `adapter.base` that are formats of weight files."""

# Of the names of tensors that only packed files have.
_ENDINGS = ("_blocks", "_scale_inv", ".weight_scale")


def shipped_by(config: RunConfig, source: ModelSource) -> Quantization | None:
    """How the weights are packed that the model is published with, or that the user names; None for
    plain ones. Ranks tell of formats that are not read."""
    place = None if config.model.weights == "random" else source.weights
    try:
        if place is None:
            # They are fetched later, or are random ones of that format.
            return quantization_in(source.hf_config, "config.json")
        found = read_quantization(place if place.is_dir() else place.parent)
    except UserError:
        return None
    # transformers leaves the section in config.json when it saves weights as floats.
    names = set() if found is None else stored_names(place)
    is_plain = bool(names) and not any(name.endswith(_ENDINGS) for name in names)
    return None if is_plain else found


def choose_format(config: RunConfig, shipped: Quantization | None) -> tuple[Any, str]:
    """A value of `adapter.base`, and why it is that where nobody asked for it. Raises where the
    model has no files in the format that was asked for."""
    given = config.adapter.base
    if given == "auto":
        why_not = _why_not_kept(config, shipped)
        if shipped is None or why_not:
            return "param", why_not
        return shipped.method, _why_kept(shipped.method)
    if given not in SHIPPED:
        return given, ""
    why = _why_other(config, shipped) if shipped is None or shipped.method != given else ""
    if why := why or _why_not_in_rows(shipped):
        raise UserError(
            f"adapter.base={given} needs a model that is published in {BASE_NAMES[given]}",
            why=f"it keeps the bytes of weight files, and {why}",
            fix="leave adapter.base out, or write adapter.base=nf4 or adapter.base=float8, which "
            "any weights can become",
        )
    return given, ""


def choose_base(config: RunConfig, model: ModelSpec) -> Choice[str]:
    """The format that was counted with."""
    if model.adapter is None:
        return Choice("param", "no weights are frozen", "rule")
    if config.adapter.base != "auto":
        return Choice(config.adapter.base, "given", "user")
    return Choice(model.adapter.packing, model.adapter.why_packing, "rule")


def _why_kept(method: str) -> str:
    return (
        f"the model is published in {BASE_NAMES[method]}: the bytes of its files stay as they are, "
        "and the floats that layers make of them are those that adapter.base=param would store"
    )


def _why_not_kept(config: RunConfig, shipped: Quantization | None) -> str:
    """Why frozen weights are floats; empty where they need not be."""
    if shipped is None:
        return "the model is not published packed; nf4 and float8 round it"
    if given_axes(config.mesh).tensor > 1:
        return f"mesh.tensor divides weights, and {BASE_NAMES[shipped.method]} stays whole"
    return _why_not_in_rows(shipped)


def _why_other(config: RunConfig, shipped: Quantization | None) -> str:
    has = "plain weights" if shipped is None else BASE_NAMES[shipped.method]
    return f"those of {config.model.name} have {has}"


def _why_not_in_rows(shipped: Quantization | None) -> str:
    """Why rows of the format cannot hold the scales of files; empty where they can."""
    columns = BLOCK if shipped is None or shipped.block is None else shipped.block[1]
    if columns % BLOCK == 0:
        return ""
    return f"a scale is for {columns} columns there, and rows have one for {BLOCK}"
