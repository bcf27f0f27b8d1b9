from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwise.facts.block_kind import BlockKind
from shardwise.parallel import saved

Way = tuple[bool, bool, str]
"""Whether with our kernels, whether with the compiler, and what is recomputed."""

PLAIN: tuple[Way, ...] = ((False, False, "none"), (False, True, "none"))


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[BlockKind, ...]]:
    """`count(config, *ways)`: what blocks save and compute in these ways. All ten ways take ten
    seconds, so a test counts those that it looks at, besides the plain ones."""

    def run(config: dict[str, Any], *ways: Way, attention: str = "sdpa") -> tuple[BlockKind, ...]:
        monkeypatch.setattr(saved, "_WAYS", (*PLAIN, *ways))
        return saved.count_saved(config, attentions=(attention,))

    return run
