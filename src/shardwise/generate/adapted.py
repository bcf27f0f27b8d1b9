"""A model with its adapters beside its weights, neither merged: as it was trained."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from shardwise.checkpoint.adapter_export import read_adapters
from shardwise.checkpoint.base import validate_under
from shardwise.checkpoint.exporter import build_plain
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.read import VerifiedCheckpoint
from shardwise.model.blocks import find_units
from shardwise.model.lora import freeze
from shardwise.model.weights import (
    allocate_shards,
    copy_shard,
    initialise_buffers,
    initialise_weights,
)
from shardwise.parallel.adapters import apply_adapters


def load_adapted(
    checkpoint: VerifiedCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    base: Path | None,
    code_dir: Path | None,
) -> PreTrainedModel:
    """The frozen weights from where training read them, or from `base`, and the adapters of the
    checkpoint, all in `dtype`, or packed as they were in training."""
    plan = checkpoint.plan
    place = base or (Path(plan.weights_dir) if plan.weights_dir else None)
    if place is not None:
        validate_under(place, read_manifest(checkpoint.path).base)
    _, adapters = read_adapters(checkpoint, code_dir)
    model = build_plain(checkpoint, code_dir)
    apply_adapters(model, plan)
    freeze(model, dtype)
    allocate_shards(model, device, buffers_on=device)
    twin = build_plain(checkpoint, code_dir)
    if place is None:
        seed, units = plan.settings.train.seed, find_units(model)
        initialise_weights(model, twin, units, seed=seed, device=device)
    else:
        # Imported on need: it relies on parts of transformers that change between releases.
        from shardwise.model.pretrained import load_pretrained

        initialise_buffers(model, twin, device)
        load_pretrained(model, place, plan.settings.model.ignore_weights)
    for name, tensor in adapters.items():
        copy_shard(model.get_parameter(name), tensor)
    return model
