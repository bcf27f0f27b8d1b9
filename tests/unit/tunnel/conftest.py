from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan

# 301 rows and 66 columns divide over no number of ranks that the tests use.
CONFIG = """\
model:
  name: tiny-llama
  overrides: {hidden_size: 32, intermediate_size: 66, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 301}
data: {source: synthetic, seq_len: 16}
train: {micro_batch: 2}
shard: {strategy: full_shard}
"""

Tunnel = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tunnel") / "run.yaml"
    file.write_text(CONFIG)
    return file


@pytest.fixture(scope="session")
def plan_of(config: Path) -> Callable[..., Plan]:
    return lambda *overrides: choose_plan(load_config(config, overrides), {})


@pytest.fixture(scope="session")
def tunnel(config: Path) -> Tunnel:
    """Runs the command in this process, which spares the seconds that torch takes to import."""

    def run(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["tunnel", str(config), *words, "--json"])
        if done.exception is not None:
            raise done.exception
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run
