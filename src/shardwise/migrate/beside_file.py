"""What a user says beside the file: `model=llama-3.1-8b cluster=8xH100 train.steps=500`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from shardwise.config.load import load_config
from shardwise.config.schema import RunConfig
from shardwise.config.schema_text import section_classes, value_at


def read_given(overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of overrides, by path; a UserError where one is wrong."""
    config = load_config(None, overrides)
    named = [word.partition("=")[0].strip() for word in overrides]
    found: dict[str, Any] = {}
    for name in named:
        section, _, field = name.partition(".")
        if section not in section_classes():
            found[name] = value_at(config, name)
        elif field:
            path = ".".join(name.split(".")[:2])
            found[path] = value_at(config, path)
        else:
            found |= _said_in(config, section)
    return {path: list(val) if isinstance(val, tuple) else val for path, val in found.items()}


def _said_in(config: RunConfig, section: str) -> dict[str, Any]:
    """Fields of a section that differ from their defaults; `model=tiny-llama` says one of them
    even where it is the default."""
    here, default = getattr(config, section), getattr(RunConfig(), section)
    first = fields(here)[0].name
    return {
        f"{section}.{item.name}": getattr(here, item.name)
        for item in fields(here)
        if item.name == first or getattr(here, item.name) != getattr(default, item.name)
    }
