from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrations import flat_rates, make_calibration
from shardwise.config.load import load_config
from shardwise.config.plain import config_to_dict
from shardwise.facts.collective_cost import Link
from shardwise.launch.identity import TOPICS, flatten, identity_of, with_paths_of
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan
from shardwise.training.agree import Account, find_disagreement

FIRST = {"LOCAL_RANK": "0"}
# Compared by what they name, or of one host alone.
BY_CONTENT = {"runs_dir", "cluster.prices", "observe.prometheus_host"}
CONFIG = """\
model: tiny-llama
data: {source: text, path: TEXT, seq_len: 32}
cluster: 2xCPU
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    text = tmp_path / "text.txt"
    text.write_text("a text " * 100)
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.replace("TEXT", str(text)))
    return choose_plan(load_config(str(file), []), environ={})


def difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    accounts = [Account(rank=rank, topics=topics) for rank, topics in enumerate((first, second))]
    error = find_disagreement(accounts, TOPICS)
    return "" if error is None else error.what


def test_an_identity_is_json_and_agrees_with_itself(plan: Plan) -> None:
    mine = identity_of(plan, FIRST)
    assert difference(mine, json.loads(json.dumps(mine))) == ""
    assert mine.keys() == {topic.name for topic in TOPICS}


def test_every_setting_is_compared(plan: Plan) -> None:
    mine = identity_of(plan, FIRST)
    fields = flatten(config_to_dict(plan.config)).keys()
    assert fields - BY_CONTENT == mine["settings"].keys()
    for name in mine["settings"]:
        other = mine | {"settings": mine["settings"] | {name: "something else"}}
        assert f"{name} is something else there" in difference(mine, other)


def test_the_first_rank_of_a_node_looks_at_its_files_and_hardware(plan: Plan) -> None:
    left_out = {"content", "calibration", "machine"}
    assert not left_out & identity_of(plan, {"LOCAL_RANK": "1"}).keys()


def test_measurements_are_told_by_their_content(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(name="measured inside a domain", bytes_per_s=1e9, hop_s=1e-5)
    found = []
    for folder, speed in (("a", 1e11), ("b", 1e11), ("c", 2e11), ("none", None)):
        monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / folder))
        if speed is not None:
            make_calibration(plan.cluster, flat_rates(speed), inside=link).save()
        found.append(identity_of(plan, FIRST))
    same, copied, other, none = found
    assert difference(same, copied) == ""
    assert "calibration is sha256" in difference(same, other)
    assert "calibration is not set there, sha256" in difference(same, none)


def test_nodes_with_other_numbers_of_ranks_are_told_apart(plan: Plan) -> None:
    first, second = (identity_of(plan, FIRST | {"LOCAL_WORLD_SIZE": count}) for count in ("1", "2"))
    assert "ranks of the node is 2 there, 1 on" in difference(first, second)


def test_a_plan_that_was_sent_gets_the_paths_of_the_node(plan: Plan, tmp_path: Path) -> None:
    elsewhere = plan.config
    for path, value in {
        "runs_dir": "/mnt/runs",
        "data.path": "/mnt/text.txt",
        "model.name": "/mnt/model",
        "observe.prometheus_host": "10.0.0.2",
        "optim.lr": 1.0,
    }.items():
        section, _, name = path.rpartition(".")
        inner = getattr(elsewhere, section) if section else elsewhere
        changed = replace(inner, **{name: value})
        elsewhere = replace(elsewhere, **{section: changed}) if section else changed
    own = replace(plan, config=elsewhere, model_dir="/mnt/model", weights_dir="/mnt/model")
    used = with_paths_of(own, plan)
    assert used.run_dir == Path("/mnt/runs", plan.config.name)
    assert (used.model_dir, used.weights_dir) == ("/mnt/model", "/mnt/model")
    assert used.config.data.path == "/mnt/text.txt" and used.config.model.name == "/mnt/model"
    # A setting is the first rank's, whatever this node was given.
    assert used.config.optim.lr == plan.config.optim.lr
    assert with_paths_of(plan, plan) == plan


@pytest.mark.parametrize(
    ("name", "compared"),
    [
        ("NCCL_ALGO", True),
        ("NCCL_MIN_NCHANNELS", True),
        ("PYTORCH_ALLOC_CONF", True),
        ("CUBLAS_WORKSPACE_CONFIG", True),
        ("NCCL_SOCKET_IFNAME", False),
        ("NCCL_IB_HCA", False),
        ("NCCL_TOPO_FILE", False),
        ("NCCL_DEBUG", False),
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("SHARDWISE_CACHE", False),
        ("SHARDWISE_RENDEZVOUS", False),
        ("HOME", True),
        ("HOSTNAME", False),
    ],
)
def test_variables_that_change_numbers_or_collectives_are_compared(
    name: str, compared: bool, plan: Plan
) -> None:
    found = difference(identity_of(plan, FIRST), identity_of(plan, FIRST | {name: "x"}))
    assert (f"{name} is x there, not set on" in found) == compared


def test_the_same_text_elsewhere_is_the_same(plan: Plan, tmp_path: Path) -> None:
    def plan_with(path: Path) -> Plan:
        data = replace(plan.config.data, path=str(path))
        return replace(plan, config=replace(plan.config, data=data))

    copy, other = tmp_path / "copy.md", tmp_path / "other.txt"
    text = (tmp_path / "text.txt").read_text()
    copy.write_text(text)
    other.write_text(text.replace("a text", "b text"))
    mine = identity_of(plan, FIRST)
    assert difference(mine, identity_of(plan_with(copy), FIRST)) == ""
    assert "samples of data.path is sha256" in difference(
        mine, identity_of(plan_with(other), FIRST)
    )


def test_a_tokenizer_in_a_directory_is_told_by_its_files(plan: Plan, tmp_path: Path) -> None:
    def plan_with(name: str, content: str) -> Plan:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
        data = replace(plan.config.data, tokenizer=str(tmp_path / name))
        return replace(plan, config=replace(plan.config, data=data))

    mine = identity_of(plan_with("a", "{}"), FIRST)
    assert difference(mine, identity_of(plan_with("b", "{}"), FIRST)) == ""
    assert "tokenizer is sha256" in difference(mine, identity_of(plan_with("c", "{ }"), FIRST))
