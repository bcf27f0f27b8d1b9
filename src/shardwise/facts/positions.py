"""The longest sequence that a model with rotary positions was made for, by config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# These scale positions by their factor, and files often keep the unscaled number beside it.
_STRETCHING = ("linear", "dynamic")
# These compute their frequencies from the longest position that a forward is given.
_CHANGING = ("dynamic", "longrope")


def rotary_limit(hf_config: Mapping[str, Any]) -> int | None:
    """The largest number of positions that the file can mean; None where it names none.

    Files disagree on whether `max_position_embeddings` counts before or after rope scaling. The
    larger reading is taken, so a sequence beyond it is too long by every reading.
    """
    stated = _whole(hf_config.get("max_position_embeddings"))
    if stated is None:
        return None
    return max([stated, *(_stretched(scaling, stated) for scaling in _scalings(hf_config))])


def changing_rope(hf_config: Mapping[str, Any], seq_len: int) -> str | None:
    """The kind of rope scaling whose frequencies depend on how long a sequence is, where `seq_len`
    is beyond the length that they change at; None where no kind does."""
    stated = _whole(hf_config.get("max_position_embeddings")) or 0
    for scaling in _scalings(hf_config):
        kind = scaling.get("rope_type", scaling.get("type"))
        original = _whole(scaling.get("original_max_position_embeddings"))
        outer = _whole(hf_config.get("original_max_position_embeddings"))
        if kind in _CHANGING and seq_len > (original or outer or stated):
            return str(kind)
    return None


def _scalings(hf_config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every description of rope scaling; families with two kinds of layers have one for each."""
    for name in ("rope_scaling", "rope_parameters"):
        found = hf_config.get(name)
        if isinstance(found, Mapping):
            yield found
            yield from (inner for inner in found.values() if isinstance(inner, Mapping))


def _stretched(scaling: Mapping[str, Any], stated: int) -> int:
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 1:
        return 0
    original = _whole(scaling.get("original_max_position_embeddings"))
    kind = scaling.get("rope_type", scaling.get("type"))
    if original is None and kind not in _STRETCHING:
        return 0
    reached = (original or stated) * factor
    # A factor of 1e400 in a file is infinity here.
    return int(reached) if reached < 2**62 else 2**62


def _whole(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else None
