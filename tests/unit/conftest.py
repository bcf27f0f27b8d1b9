"""What several rooms' tests share; helpers beside this file can be imported by name."""

from __future__ import annotations

import pytest

from shardwise.config.schema import ClusterConfig, DataConfig, ModelConfig, RunConfig
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan


@pytest.fixture(scope="session")
def plan() -> Plan:
    """Llama 3.1 8B on a node of H100."""
    config = RunConfig(
        model=ModelConfig(name="llama-3.1-8b"),
        cluster=ClusterConfig(name="8xH100"),
        data=DataConfig(seq_len=4096),
    )
    return choose_plan(config, {})
