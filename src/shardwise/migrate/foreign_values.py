"""Values as the other tools read them: YAML 1.1's words, and numbers that are written as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shardwise.config.schema_text import show_value
from shardwise.migrate.line import BadValueError

_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32", "no"), "fp32"),
}
Convert = Callable[[Any], Any]


def flag(value: Any) -> bool:
    """A yes or no in any spelling that YAML 1.1 or a launcher's flags know."""
    found = _WORDS.get(str(value).strip().lower())
    if found is None:
        raise BadValueError(f"{show_value(value)} is neither true nor false")
    return found


def number(value: Any) -> float:
    """A finite number; text such as "2e-5" is one."""
    try:
        found = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    if isinstance(value, bool) or not math.isfinite(found):
        raise BadValueError(f"{show_value(value)} is no number")
    return found


def whole(value: Any) -> int:
    """A whole number; text such as "5e8" is one."""
    found = number(value)
    if not found.is_integer():
        raise BadValueError(f"{show_value(value)} is no whole number")
    return int(found)


def positive(value: Any) -> int:
    """A whole number of at least one."""
    found = whole(value)
    if found < 1:
        raise BadValueError(f"{show_value(value)} is less than one")
    return found


def text(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise BadValueError(f"{show_value(value)} is no text")
    return value


def names(value: Any) -> list[str]:
    """A list of names; text with commas is one."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise BadValueError(f"{show_value(value)} is no list of names")
    return [part.strip() for part in parts if part.strip()]


def dtype(value: Any) -> str:
    """One of our three formats."""
    found = _DTYPES.get(str(value).strip().lower())
    if found is None:
        raise BadValueError(f"{show_value(value)} is none of bf16, fp16 and fp32")
    return found


def one_of(words: dict[str, Any]) -> Convert:
    """A reader of a fixed set of words, without regard to case."""

    def convert(value: Any) -> Any:
        key = str(value).strip().lower()
        if key not in words:
            raise BadValueError(f"{show_value(value)} is none of {', '.join(words)}")
        return words[key]

    return convert
