"""How `shardwise data show` looks on a terminal."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.cli import data
from shardwise.data.masking import Example


class Letters:
    """A template of which every id is a letter."""

    def decode(self, ids: np.ndarray) -> str:
        return "".join(map(chr, ids))


def example_of(text: str, mask: str) -> Example:
    ids = np.array([ord(letter) for letter in text], dtype=np.int32)
    return Example(ids, np.array([mark == "x" for mark in mask]), "row")


@pytest.mark.parametrize(
    ("in_colour", "shown"),
    [
        (False, ["ab", "⟦c\nd⟧", "e?f"]),
        (True, ["ab", "\x1b[32mc\nd\x1b[0m", "e?f"]),
    ],
)
def test_runs_of_tokens_are_green_or_in_brackets(in_colour: bool, shown: list[str]) -> None:
    example = example_of("abc\nde\x1bf", "..xxx...")
    assert data._pieces(example, Letters(), in_colour) == shown  # type: ignore[arg-type]
