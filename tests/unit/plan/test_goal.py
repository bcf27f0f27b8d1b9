"""Fewer devices, cheaper tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config.load import load_config
from shardwise.facts.cluster import parse_cluster
from shardwise.launch.prepare import choose_plan
from shardwise.plan.goal import Goal, parts_of
from shardwise.plan.planned import Plan


def plan_for(goal: Goal, folder: Path, *overrides: str) -> Plan:
    file = folder / "run.yaml"
    file.write_text("data:\n  seq_len: 4096\n")
    return choose_plan(load_config(file, overrides), {}, goal)


def test_parts_of_a_cluster_are_parts_of_a_node_and_nodes() -> None:
    names = [part.name for part in parts_of(parse_cluster("3x8xH100"))]
    assert names == ["1xH100", "2xH100", "4xH100", "8xH100", "2x8xH100", "3x8xH100"]
    assert [part.nvlink_domain for part in parts_of(parse_cluster("2x8xH100"))][:2] == [1, 2]


@pytest.mark.parametrize(
    ("model", "fewest"), [("llama-3.2-1b", 1), ("llama-3.1-8b", 2), ("llama-3.1-70b", 16)]
)
def test_the_fewest_devices_that_fit(model: str, fewest: int, tmp_path: Path) -> None:
    words = (f"model.name={model}", "cluster.name=8x8xH100")
    plan = plan_for("fewest", tmp_path, *words)
    assert plan.world_size == fewest
    assert not any("run out of memory" in warning for warning in plan.warnings)


def test_the_cheapest_token_is_no_dearer_than_the_fastest(tmp_path: Path) -> None:
    words = ("model.name=llama-3.1-8b", "cluster.name=8x8xH100", "cluster.interconnect=12.5")
    cheap, fast = (plan_for(goal, tmp_path, *words).forecast for goal in ("cheapest", "fastest"))
    assert cheap is not None and fast is not None
    assert cheap.usd_per_billion_tokens is not None and fast.usd_per_billion_tokens is not None
    assert cheap.usd_per_billion_tokens < 0.8 * fast.usd_per_billion_tokens
    assert cheap.hours_per_billion_tokens > fast.hours_per_billion_tokens


def test_a_model_that_fits_nowhere_is_refused_as_ever(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="does not fit on 8xH100"):
        plan_for("fewest", tmp_path, "model.name=llama-3.1-405b", "cluster.name=8xH100")
