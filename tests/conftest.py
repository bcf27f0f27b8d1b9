"""What holds for all tests: a calibration of this machine must not change what a plan says."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty cache directory for this process and all that it starts."""
    before = os.environ.get("SHARDWISE_CACHE")
    os.environ["SHARDWISE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["SHARDWISE_CACHE"]
    else:
        os.environ["SHARDWISE_CACHE"] = before
