from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.plan.plan import Plan


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[..., Plan]:
    """Plans a run that is said in overrides only, away from any launcher's environment."""

    def plan(*overrides: str, environ: Mapping[str, str] | None = None) -> Plan:
        file = tmp_path / "run.yaml"
        file.write_text("")
        return choose_plan(load_config(file, overrides), environ or {})

    return plan
