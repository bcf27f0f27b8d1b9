from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from shardwise.config.load import load_config
from shardwise.facts.cluster import resolve_cluster
from shardwise.facts.families import spec_from_config
from shardwise.facts.models import read_model_config
from shardwise.launch.prepare import choose_plan
from shardwise.plan import choose
from shardwise.plan.planned import Plan


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[..., Plan]:
    """Plans a run that is said in overrides only, away from any launcher's environment."""

    def plan(*overrides: str, environ: Mapping[str, str] | None = None) -> Plan:
        file = tmp_path / "run.yaml"
        file.write_text("")
        return choose_plan(load_config(file, overrides), environ or {})

    return plan


@pytest.fixture
def tree_plan_of(tmp_path: Path) -> Callable[..., Plan]:
    """The same where nothing is known of speed: the decision tree alone decides."""

    def plan(*overrides: str) -> Plan:
        file = tmp_path / "run.yaml"
        file.write_text("")
        config = load_config(file, overrides)
        source = read_model_config(config.model)
        model = spec_from_config(config.model.name, source.hf_config)
        return choose.choose_plan(config, model, resolve_cluster(config.cluster, {}), source)

    return plan
