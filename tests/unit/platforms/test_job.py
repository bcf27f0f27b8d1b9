"""A job from a plan: the time it may take, the time to save, its environment, fewer nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config.load import load_config
from shardwise.config.schema import LaunchConfig
from shardwise.errors import UserError
from shardwise.facts.allocator import ALLOCATOR
from shardwise.plan.checkpoint_size import checkpoint_bytes
from shardwise.plan.elastic import as_launched, with_nodes
from shardwise.plan.planned import Plan
from shardwise.platforms.foresight import WRITE_BYTES_PER_S, choose_grace, choose_walltime
from shardwise.platforms.job import Job, build_job
from shardwise.platforms.submission import find_submission, submission_of


def with_launch(plan: Plan, **said: object) -> Plan:
    return replace(plan, config=replace(plan.config, launch=LaunchConfig(**said)))


def job_of(plan: Plan, **said: object) -> Job:
    return build_job(with_launch(plan, **said), command="/bin/shardwise", least_nodes=1)


def test_a_save_gets_a_step_a_checkpoint_and_half_a_minute(plan: Plan) -> None:
    assert plan.forecast is not None
    grace = choose_grace(plan)
    least = plan.forecast.step_s + checkpoint_bytes(plan) / WRITE_BYTES_PER_S + 30
    assert least <= grace.value < least + 1
    assert "to write a checkpoint of 89.7 GiB" in grace.why
    assert choose_grace(with_launch(plan, grace_s=7.2)).value == 8


def test_the_time_limit_is_the_forecast_with_a_margin(plan: Plan) -> None:
    assert plan.forecast is not None
    limit = choose_walltime(plan)
    assert limit.value is not None and "1000 steps of" in limit.why
    assert limit.value > 1.25 * 1000 * plan.forecast.step_s + choose_grace(plan).value
    assert choose_walltime(with_launch(plan, walltime_s=60.0)).value == 60.0
    # A plan without a speed promises none.
    assert choose_walltime(replace(plan, forecast=None)).value is None


def test_each_variable_has_a_reason_and_the_users_own_comes_instead(plan: Plan) -> None:
    own = {one.name: one for one in job_of(plan).environment}
    assert own[ALLOCATOR[0]].value == ALLOCATOR[1] and own["NCCL_DEBUG"].value == "WARN"
    assert all(one.why for one in own.values())
    assert "NCCL_IB_TIMEOUT" not in own, "one node has no network between nodes"
    said = job_of(plan, environment={"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "ib0"})
    values = [(one.name, one.value) for one in said.environment]
    assert values.count(("NCCL_DEBUG", "INFO")) == 1 and ("NCCL_DEBUG", "WARN") not in values
    assert ("NCCL_SOCKET_IFNAME", "ib0") in values


def test_what_ranks_read_is_absolute_and_holds_the_global_batch_where_nodes_may_go(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_of(plan)
    assert job.run_dir == tmp_path / "runs" / "run" and job.work_dir == tmp_path
    assert job.config_path == job.run_dir / "launch" / "run.yaml"
    job.config_path.parent.mkdir(parents=True)
    job.config_path.write_text(job.config_text)
    assert load_config(job.config_path) == job.config
    assert job.config.train.global_batch == "auto"
    assert job_of(plan, elastic=True).config.train.global_batch == plan.decided.global_batch


ELASTIC = (
    "model=tiny-llama",
    "cluster=4x2xCPU",
    "launch.elastic=true",
    "train.global_batch=16",
    "train.accumulation=1",
    "mesh.replicate=4",
)


def test_fewer_nodes_keep_the_global_batch_and_leave_its_shares_open() -> None:
    config = load_config(None, ELASTIC)
    fewer = as_launched(config, {"RANK": "1", "WORLD_SIZE": "2"})
    assert fewer == with_nodes(config, 1)
    assert fewer.cluster.name == "1x2xCPU" and fewer.train.global_batch == 16
    assert fewer.train.accumulation == fewer.mesh.replicate == "auto"


@pytest.mark.parametrize(
    "environ",
    [{}, {"RANK": "0", "WORLD_SIZE": "8"}, {"RANK": "0", "WORLD_SIZE": "3"}],
    ids=["no launcher", "all nodes", "half a node"],
)
def test_other_worlds_are_left_to_the_plan(environ: dict[str, str]) -> None:
    config = load_config(None, ELASTIC)
    assert as_launched(config, environ) == config


def test_without_elastic_a_world_that_is_too_small_is_left_to_be_refused() -> None:
    config = load_config(None, [*ELASTIC, "launch.elastic=false"])
    assert as_launched(config, {"RANK": "0", "WORLD_SIZE": "2"}) == config


def test_elastic_needs_a_global_batch() -> None:
    config = load_config(None, [*ELASTIC, "train.global_batch=auto"])
    with pytest.raises(UserError, match=r"launch\.elastic needs train\.global_batch"):
        with_nodes(config, 1)


def test_a_submission_is_found_in_the_run_directory(plan: Plan, tmp_path: Path) -> None:
    assert find_submission(tmp_path) is None
    job = replace(job_of(plan), run_dir=tmp_path)
    made = submission_of(job, "local", "7.1", 1.5)
    made.save()
    assert find_submission(tmp_path) == made


@pytest.mark.parametrize("text", ["", "{}", '{"platform": 7}', "[1]"])
def test_a_torn_submission_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "submission.json").write_text(text)
    with pytest.raises(UserError, match="does not say which job was submitted"):
        find_submission(tmp_path)
