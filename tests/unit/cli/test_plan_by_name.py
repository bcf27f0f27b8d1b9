"""`shardwise plan --model NAME --cluster NAME`, and what the whole of a run comes to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from test_cli_speed import loaded_after

from commands import SHARDWISE, run_installed
from shardwise.cli.main import app
from shardwise.cli.named_run import read_amount
from shardwise.errors import UserError
from shardwise.facts.config_source import preset_named
from shardwise.facts.prices import SAMPLE

_NAMED = ("--model", "Qwen/Qwen3-8B", "--cluster", "8xH100", "--seq", "4096", "--micro-batch", "2")


def value_of(name: str, text: str) -> str:
    found = re.search(rf"^  {name} +(.+)$", text, flags=re.MULTILINE)
    assert found, f"{name} is not in\n{text}"
    return found[1]


def test_a_model_and_a_cluster_are_enough_for_a_plan() -> None:
    text = run_installed("plan", *_NAMED, "--global-batch", "64", "--tokens", "15B").stdout
    assert text.startswith("qwen3-8b (8.19B parameters) on 8xH100")
    assert value_of("micro_batch", text).startswith("2 ")
    assert "15.00B tokens" in text
    assert "refuses" not in text  # nothing is trained, so no data is asked for


def test_no_torch_is_imported_for_it(tmp_path: Path) -> None:
    words = ["plan", "--model", "llama-3.1-8b", "--cluster", "8xH100"]
    code = f"from shardwise.cli.main import app; app({words!r}, standalone_mode=False)"
    assert loaded_after(code, tmp_path) == set()


def test_the_whole_run_has_steps_tokens_time_cost_passes_and_checkpoints(tmp_path: Path) -> None:
    words = ["plan", *_NAMED, "train.steps=500", "train.global_batch=64", "data=stdlib"]
    run = json.loads(run_installed(*words, "data.tokenizer=byte", "--json").stdout)
    whole, forecast = run["run"], run["forecast"]
    assert whole["steps"] == 500
    assert whole["tokens"] == 500 * 64 * 4096
    assert whole["seconds"] == pytest.approx(500 * forecast["step_s"])
    assert whole["usd"] == pytest.approx(whole["seconds"] / 3600 * 8 * 3.29)
    assert 0.5 < whole["epochs"] * 8e6 / whole["tokens"] < 2  # stdlib is 8 MB at most
    # fp32 parameters and two moments.
    assert whole["checkpoint_bytes"] == 12 * run["model"]["total_params"]


def test_a_change_says_what_it_does_to_the_whole_run() -> None:
    text = run_installed("plan", *_NAMED, "train.steps=500", "--set", "train.steps=1000").stdout
    assert "run's steps" in text and "500 -> 1,000" in text
    assert "run's time" in text and "run's cost" in text


def test_a_change_says_what_it_does_to_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", *_NAMED, "--tokens", "15B")
    text = said(capsys, *words, "--set", "memory.checkpoint_activations=full")
    budget = json.loads(said(capsys, *words, "--json"))["budget"]
    assert budget["tokens"] == 15e9
    assert f"USD {budget['usd']:,.0f} -> " in " ".join(value_of("15.00B tokens", text).split())
    assert "--json and --set answer apart" in refused(*words, "--json", "--set", "train.steps=9")


def test_a_price_has_its_source_and_its_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.fullmatch(
        r"USD \d\.\d\d a GPU-hour \(\w+, 20\d\d-\d\d-\d\d\)",
        value_of("price", said(capsys, "plan", *_NAMED)),
    )
    for price in yaml.safe_load(SAMPLE.read_text())["gpu_hour"].values():
        assert set(price) == {"usd", "from", "date"}
    own = tmp_path / "own.yaml"
    own.write_text("gpu_hour: {H100: 2}\n")
    text = said(capsys, "plan", *_NAMED, f"cluster.prices={own}")
    assert value_of("price", text) == "USD 2.00 a GPU-hour (own.yaml)"
    own.write_text("gpu_hour: {H100: {usd: -2}}\n")
    assert "-2.0 is no price" in refused("plan", *_NAMED, f"cluster.prices={own}")
    assert "the least is 0" in refused("plan", *_NAMED, "cluster.usd_per_gpu_hour=-1")


@pytest.mark.parametrize(
    ("text", "count"), [("15B", 15e9), ("1.5t", 1.5e12), ("500M", 5e8), ("15e9", 15e9)]
)
def test_amounts_are_read_as_people_write_them(text: str, count: float) -> None:
    assert read_amount(text) == count


@pytest.mark.parametrize("text", ["B", "15X", "-3B", "0", "nan", "inf"])
def test_what_is_no_amount_is_an_error_with_a_fix(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(text))) as found:
        read_amount(text)
    assert "15B" in found.value.fix


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("somebody/another-model", None),
    ],
)
def test_a_hub_id_of_a_known_shape_is_that_preset(name: str, preset: str | None) -> None:
    assert preset_named(name) == preset


def test_without_file_and_model_the_error_names_both() -> None:
    text = run_installed("plan", expect=2, command=(SHARDWISE,)).stderr
    assert "shardwise plan FILE" in text and "--model" in text


# ---- a GPU that the catalogue does not know ----------------------------------------------------

_X1 = ("--cluster", "2x8xX1", "--gpu-tflops", "400", "--gpu-gib", "96", "--gpu-gbps", "1600.5")


def test_an_unknown_gpu_is_planned_as_it_is_described(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = json.loads(said(capsys, "plan", "--model", "llama-3.1-8b", *_X1, "--json"))
    cluster, forecast = plan["cluster"], plan["forecast"]
    assert cluster["memory_bytes"] == 96 * 2**30
    assert cluster["gpu"]["memory_bandwidth"] == 1600.5e9
    assert 0.1 < forecast["mfu"] < 0.7
    assert plan["run"]["usd"] is None
    assert plan["config"]["cluster"]["gpu_gib"] == 96  # so a run of this plan has the same


@pytest.mark.long
def test_the_page_of_an_unknown_gpu_looks_at_other_sizes_and_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    said(capsys, "plan", "--model", "llama-3.1-8b", *_X1, "--html", str(page))
    assert {"X1", "H100"} <= set(re.findall(r"\b\w+\b", page.read_text()))


def test_a_file_is_compared_on_an_unknown_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: llama-3.1-8b\ndata: {source: synthetic}\ncluster: 8xH100\n")
    text = said(capsys, "compare", str(file), "--tokens-per-s", "5000", *_X1)
    assert "2x8xX1" in text and "expected" in text
    assert refused("compare", "--model", "llama-3.1-8b", "--tokens-per-s", "9", *_X1).startswith(
        "there is no file, and a GPU that is not in the catalogue"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (_X1[:4], "a GPU is described without --gpu-gib and --gpu-gbps"),
        (_X1[:6], "fix: write --gpu-gbps 1600"),
        (("--cluster", "8xH100", *_X1[2:]), "H100 is in the catalogue, so cluster.gpu_gib"),
        (("--cluster", "2xCPU", *_X1[2:]), "cluster.name=2xCPU names no GPU"),
        (_X1[2:], "cluster.name=local names no GPU"),
        (_X1[:2], "others are described by cluster.peak_tflops, cluster.gpu_gib and"),
        ((*_X1[:4], "--gpu-gib", "0", "--gpu-gbps", "1"), "it must be above 0"),
        ((*_X1[:4], "--gpu-gib", "1e300", "--gpu-gbps", "1"), "at most 1e+06"),
    ],
)
def test_a_description_is_whole_and_needed(words: tuple[str, ...], says: str) -> None:
    assert says in refused("plan", "--model", "llama-3.1-8b", *words)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    app([*words], standalone_mode=False)
    return capsys.readouterr().out


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        app([*words], standalone_mode=False)
    return str(caught.value)


def test_a_plan_says_where_the_gpu_waits_for_the_host() -> None:
    small = ("--model", "llama-3.2-1b", "--cluster", "8xH200", "--seq", "512")
    late = run_installed("plan", *small, "--micro-batch", "1").stdout
    share, why = value_of("host", late).split(" of a step ", 1)
    assert 0.3 < int(share.removeprefix("the GPU waits ").rstrip("%")) / 100 < 0.95
    assert why.startswith("for the host to launch")
    assert "  host " not in run_installed("plan", *small, "--micro-batch", "32").stdout
