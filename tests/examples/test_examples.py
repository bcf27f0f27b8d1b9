from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from shardwise.config.load import load_config
from shardwise.launch import prepare
from shardwise.launch.prepare import choose_plan
from shardwise.plan.checkpoint_size import checkpoint_bytes
from shardwise.plan.planned import Plan
from shardwise.plan.whole_run import DataSize, whole_run

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
# (strategy, shard axis) that the notes in the file speak of.
EXPECTED = {
    "demo": ("full_shard", 2),
    "llama-3.1-8b-8xh100": ("full_shard", 8),
    "llama-3.1-70b-4x8xh100": ("full_shard", 32),
    "llama-3.2-1b-1xh100": ("no_shard", 1),
    "qwen2.5-7b-8xa100-jsonl": ("full_shard", 8),
    "mixtral-8x7b-4x8xh100": ("full_shard", 32),
    "llama-3.1-8b-offload-1xh100": ("no_shard", 1),
    "llama-3.1-8b-sft-8xh100": ("full_shard", 8),
    "llama-3.1-8b-lora-1xh100": ("no_shard", 1),
    "llama-3.1-70b-hsdp-4x8xh200": ("hybrid_shard", 8),
    "qwen3-30b-a3b-lora-1xh200": ("no_shard", 1),
    "llama-3.1-70b-qlora-1xh200": ("no_shard", 1),
    "llama-3.1-8b-qlora-1xrtx4090": ("no_shard", 1),
    "llama-3.1-8b-dpo-8xh100": ("no_shard", 1),
    "llama-3.1-70b-hsdp-tp2-8x8xh100": ("hybrid_shard", 8),
    "mixtral-8x7b-ep4-4x8xh100": ("full_shard", 32),
}


# (replicate, tensor, expert) of the sizing table's last rows.
SIZED = {
    "llama-3.1-70b-hsdp-tp2-8x8xh100": (4, 2, 1),
    "mixtral-8x7b-ep4-4x8xh100": (1, 1, 4),
}


@pytest.fixture(autouse=True)
def without_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with adapters are those of their shape: counting them takes twenty seconds each."""
    monkeypatch.setattr(prepare, "COUNTED_PARAMS", 2**60)


@cache
def plan_of(file: Path) -> Plan:
    return choose_plan(load_config(file, []), {})


def test_the_examples_are_those_of_the_package() -> None:
    packaged = sorted((ROOT / "src/shardwise/examples").glob("*.yaml"))
    assert [file.name for file in EXAMPLES] == [file.name for file in packaged]
    assert set(EXPECTED) <= {file.stem for file in EXAMPLES}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_begins_with_the_command_that_runs_it(file: Path) -> None:
    first = file.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert f"shardwise train examples/{file.name}" in first


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_plans_within_its_devices(file: Path) -> None:
    plan = plan_of(file)
    assert plan.memory.total <= plan.cluster.memory_bytes
    assert plan.config.name == file.stem


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_is_sharded_as_its_notes_say(name: str) -> None:
    plan = plan_of(ROOT / "examples" / f"{name}.yaml")
    assert (plan.decided.strategy, plan.decided.shard) == EXPECTED[name]


def test_ranks_share_work_where_the_sizing_table_says_so() -> None:
    plans = [plan_of(ROOT / "examples" / f"{name}.yaml").decided for name in SIZED]
    assert [(each.replicate, each.tensor, each.expert) for each in plans] == [*SIZED.values()]


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "demo"])
def test_a_step_reads_one_to_four_million_tokens(name: str) -> None:
    """Of text. Conversations are fewer, and a step of them is smaller."""
    plan = plan_of(ROOT / "examples" / f"{name}.yaml")
    least = 2**20 if plan.config.data.format == "text" else 2**17
    assert least <= plan.tokens_per_step <= 2**22


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_run_of_several_nodes_is_started_by_torchrun(file: Path) -> None:
    first = file.read_text().splitlines()[0]
    cluster = plan_of(file).cluster
    counts = f"torchrun --nnodes {cluster.num_nodes} --nproc-per-node {cluster.devices_per_node}"
    assert (counts in first) == (cluster.num_nodes > 1)


# A figure of a comment, and what the plan has for it.
FIGURES: dict[str, Callable[[Plan], float]] = {
    r"([\d.]+)B tokens:": lambda plan: tokens_of(plan) / 1e9,
    r"([\d.]+)M tokens:": lambda plan: tokens_of(plan) / 1e6,
    r"about ([\d.]+|an) hours? .*by the plan": lambda plan: seconds_of(plan) / 3600,
    r"about ([\d.]+) minutes by the plan": lambda plan: seconds_of(plan) / 60,
    r"or (\d+) GPU-hours": lambda plan: plan.cluster.world_size * seconds_of(plan) / 3600,
    r"([\d.]+)M tokens a step": lambda plan: plan.tokens_per_step / 1e6,
    r"(\d+)k tokens a step": lambda plan: plan.tokens_per_step / 1e3,
    r"(\d+) GB each": lambda plan: checkpoint_bytes(plan) / 1e9,
    r"(\d+) GB of states": lambda plan: plan.memory.states / 1e9,
    r"[Ss]tates take (\d+) GB": lambda plan: plan.memory.states / 1e9,
}


def tokens_of(plan: Plan) -> float:
    return plan.config.train.steps * plan.tokens_per_step


def seconds_of(plan: Plan) -> float:
    seconds = whole_run(plan, DataSize(tokens=None, words="")).seconds
    assert seconds is not None
    return seconds


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_figures_of_an_example_are_the_plans(file: Path) -> None:
    """Each is the plan's, rounded to as many digits as the comment has."""
    plan, text = plan_of(file), file.read_text()
    found = [(name, each[1]) for name in FIGURES for each in re.finditer(name, text)]
    wrong = []
    for name, figure in found:
        number = figure.replace("an", "1")
        digits = len(number.replace(".", "").strip("0"))
        planned = f"{FIGURES[name](plan):.{digits}g}"
        if float(planned) != float(number):
            wrong.append(f"{name}: {number}, planned {planned}")
    assert not wrong
    # Tokens, time and the tokens of a step, at least; the demo's plan has no time.
    assert file.stem == "demo" or len(found) >= 3
