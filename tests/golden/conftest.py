from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import rank_environment

GOLDEN = Path(__file__).with_name("losses.json")


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    return rank_environment()


@pytest.fixture(scope="session")
def losses_of() -> Callable[[Path], dict[int, float]]:
    """Loss by step, as events.jsonl records it."""

    def read(run_dir: Path) -> dict[int, float]:
        lines = (run_dir / "events.jsonl").read_text().splitlines()
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return {event["step"]: event["loss"] for event in events if event["event"] == "step"}

    return read


@pytest.fixture(scope="session")
def assert_golden(losses_of: Callable[[Path], dict[int, float]]) -> Callable[[str, Path], None]:
    """Compares a run's losses with the recorded ones, or records them."""

    def check(name: str, run_dir: Path) -> None:
        losses = losses_of(run_dir)
        assert list(losses) == list(range(1, 9))
        recorded = json.loads(GOLDEN.read_text())
        if os.environ.get("SHARDWISE_WRITE_GOLDEN") == "1":
            recorded[name] = list(losses.values())
            GOLDEN.write_text(json.dumps(recorded, indent=2) + "\n")
        assert list(losses.values()) == pytest.approx(recorded[name], rel=1e-4)

    return check
