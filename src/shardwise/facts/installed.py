"""Packages that a plan uses where they are installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def has_flash_attention() -> bool:
    """Whether FlashAttention 4 is installed. Older versions are packages of the same name, and
    importing them takes seconds."""
    found = find_spec("flash_attn")
    places = [] if found is None else found.submodule_search_locations or []
    return any((Path(place) / "cute").is_dir() for place in places)
