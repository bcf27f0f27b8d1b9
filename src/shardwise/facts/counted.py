"""Sizes that were counted from a model's code, kept so that a plan needs torch only once.

Those of our presets come with the package. Others are in the user's cache, for the releases of
torch and transformers that they were counted with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwise.facts.families import spec_from_config
from shardwise.facts.models import ModelSpec
from shardwise.facts.presets import PRESETS
from shardwise.files import cache_folder, read_json, replace_file
from shardwise.version import __version__

SHIPPED = Path(__file__).parent / "counted_presets.json"
_COUNTED_WITH = ("torch", "transformers")
# What is counted of a model. A record of an earlier number lacks attentions that run without being
# declared, or the number of tensors that are packed, or has norms of each head for itself.
_RECORD = "5"


def config_key(hf_config: Mapping[str, Any]) -> str:
    """A name for this config.json."""
    text = json.dumps(hf_config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def shipped_spec(name: str, hf_config: Mapping[str, Any]) -> ModelSpec | None:
    """The sizes of a preset that was counted before."""
    found = _shipped().get(config_key(hf_config))
    return None if found is None else replace(ModelSpec.from_dict(found), name=name)


@cache
def _shipped() -> dict[str, Any]:
    return dict(read_json(SHIPPED))


def preset_spec(name: str) -> ModelSpec:
    """The sizes of a preset. None of them needs torch."""
    hf_config = PRESETS[name]
    return shipped_spec(name, hf_config) or spec_from_config(name, hf_config)


def kept_spec(name: str, hf_config: Mapping[str, Any]) -> ModelSpec | None:
    """Sizes that an earlier plan has counted here. A file that cannot be read counts as none."""
    try:
        return replace(ModelSpec.from_dict(read_json(_place(hf_config))), name=name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_spec(spec: ModelSpec, hf_config: Mapping[str, Any]) -> None:
    """Keep them for the next plan. Without room or permission the next plan counts again."""
    place = _place(hf_config)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, json.dumps(spec.to_dict()).encode())
    except OSError:
        pass


def _place(hf_config: Mapping[str, Any]) -> Path:
    software = [_RECORD, __version__, *map(_version_of, _COUNTED_WITH)]
    return cache_folder("models") / f"{config_key(hf_config)}-{'-'.join(software)}.json"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
