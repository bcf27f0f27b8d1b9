"""Which sinks a rank feeds, and what is refused before ranks start."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config.load import load_config
from shardwise.errors import ExitCode, UserError
from shardwise.launch import prepare
from shardwise.metrics.sinks.open import open_sinks
from shardwise.plan.planned import Plan

# What ends a sink goes to the log of its rank, with its stack.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    file = tmp_path / "run.yaml"
    file.write_text("model: tiny-llama\ndata: synthetic\ncluster: 2xCPU\n")
    # Nothing listens on an address of another machine, so that the endpoint fails to open.
    words = [f"runs_dir={tmp_path}", "observe.tensorboard=true", "observe.prometheus_port=9630"]
    return prepare.choose_plan(
        load_config(str(file), [*words, "observe.prometheus_host=192.0.2.9"])
    )


@pytest.mark.parametrize(
    ("rank", "local_rank", "names"),
    [(0, 0, ["tensorboard", "prometheus"]), (1, 1, []), (8, 0, ["prometheus"]), (9, 1, [])],
)
def test_rank_0_feeds_all_and_other_nodes_their_endpoint(
    plan: Plan, rank: int, local_rank: int, names: list[str]
) -> None:
    feeds = open_sinks(plan, rank=rank, local_rank=local_rank)
    assert [feed.name for feed in feeds] == names
    for feed in feeds:
        feed.close()


def test_an_address_that_cannot_be_bound_is_a_sink_that_failed(plan: Plan) -> None:
    feed = open_sinks(plan, rank=8, local_rank=0)[0]
    feed.close()
    assert feed.failure is not None
    assert feed.failure.startswith("OSError: ")


def test_wandb_that_is_not_installed_is_said_before_ranks_start(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "find_spec", lambda name: None)
    prepare.validate_sinks(plan.config)
    config = load_config(str(tmp_path / "run.yaml"), ["observe.wandb=offline"])
    with pytest.raises(UserError, match=r"observe.wandb=offline needs wandb") as caught:
        prepare.validate_sinks(config)
    assert caught.value.code == ExitCode.ENVIRONMENT
