"""`shardwise compare` through the real command."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from commands import run_installed
from shardwise.cli.main import app
from shardwise.compare.published_rows import PUBLISHED
from shardwise.errors import UserError

_MEGATRON = (
    *("compare", "--model", "Qwen/Qwen3-30B-A3B", "--cluster", "16xH800", "--seq", "8192"),
    *("--stack", "megatron", "--tp", "1", "--pp", "2", "--ep", "8"),
)
_8B = "model: llama-3.1-8b\ndata: {source: synthetic, seq_len: 8192}\ncluster: 8xH100\n"


def told(*words: str, expect: int = 0) -> str:
    done = run_installed(*words, expect=expect)
    text = done.stdout + done.stderr
    assert expect or max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def test_a_run_of_another_stack_is_placed_and_its_assumptions_are_said() -> None:
    text = told(*_MEGATRON, "--tokens-per-s", "6325")
    assert "verdict as expected" in text
    assert "nine of ten of megatron-bridge" in text
    assert "published runs of mixtures of experts" in text
    # The cluster is two usual nodes, and the pipeline's idle share is (2-1)/(16+2-1).
    assert "on 2x8xH800" in text
    assert "a pipeline that is idle 6% of the time or more: 2 stages, 16 micro-batches" in text
    assert "fused kernels, FlashAttention 3 or as fast, as megatron usually runs" in text


def test_a_slow_run_gets_three_reasons_with_a_check_each() -> None:
    text = told(*_MEGATRON, "--tokens-per-s", "3000")
    assert "verdict slower than expected" in text
    assert text.count("check: ") == 3


def test_a_figure_of_all_gpus_is_recognised() -> None:
    text = told(*_MEGATRON, "--tokens-per-s", str(6325 * 16), expect=2)
    assert "of the peak of H800" in text
    assert "write --tokens-per-s 6325" in text


def test_a_plan_of_ours_is_compared_with_speed_and_memory(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(_8B)
    file = str(tmp_path / "run.yaml")
    plan = json.loads(run_installed("plan", file, "--json").stdout)
    speed = plan["forecast"]["tokens_per_s"]
    held = sum(plan["memory"][part] for part in ("params", "grads", "optimizer", "activations"))
    answer = json.loads(
        run_installed("compare", file, "--tokens-per-s", str(0.6 * speed), "--json").stdout
    )
    assert answer["expected"] == pytest.approx(speed)
    assert answer["verdict"] == "slower than expected"
    assert len(answer["reasons"]) == 3
    text = told("compare", file, "--tokens-per-s", f"{speed:.0f}", "--memory", f"{held / 2**31}")
    assert "verdict as expected" in text and "memory less than expected" in text
    assert "likeliest reasons" not in text  # nothing is missing
    # As the plan prints it, and with a change beside the file.
    more = ("--tokens-per-s", "10.7k", "--memory", "71", "--seq", "4096", "--json")
    other = json.loads(run_installed("compare", file, *more).stdout)
    assert other["measured"] == 10700 and other["memory"]["measured"] == 71 * 2**30
    assert other["expected"] > 1.02 * speed
    # MFU of float8, of mixtures and of frozen weights says other things.
    assert other["published_kind"] == "dense models in 16 bits on H100"


def test_an_option_that_a_file_or_the_table_would_ignore_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(_8B)
    beside = [str(file), "--tokens-per-s", "9000", "--stack", "megatron", "--tp", "2"]
    for words, says in ((beside, "--stack and --tp would be ignored"),
                        (["--published", "--json"], "leave --published out")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            app(["compare", *words], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("compare",), "--tokens-per-s is missing"),
        ((*_MEGATRON, "--tokens-per-s", "fast"), "such as 6325 or 10.7k"),
        (("compare", "--tokens-per-s", "5"), "neither a file nor a model"),
        ((*_MEGATRON, "--tokens-per-s", "5", "--memory", "71"), "name a file"),
        (("compare", "--model", "llama-3.1-8b", "--cluster", "8xH100", "--ep", "2",
          "--tokens-per-s", "9000"), "has no experts"),
        (("compare", "--model", "llama-3.1-8b", "--cluster", "8xH100", "--tp", "3",
          "--tokens-per-s", "9000"), "does not divide 8 GPUs"),
        (("compare", "--model", "llama-3.1-8b", "--cluster", "8xH100", "--stack", "megatorn",
          "--tokens-per-s", "9000"), "did you mean --stack megatron"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_an_error_with_a_fix(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as found:
        app([*words], standalone_mode=False)
    assert says in str(found.value)
    assert found.value.fix


def test_most_published_runs_are_as_expected_and_doubted_ones_are_doubtful() -> None:
    text = told("compare", "--published")
    runs, as_expected, slower, faster, doubtful = map(
        int, re.search(r"all +(\d+) (\d+) (\d+) (\d+) (\d+)", text).groups()  # type: ignore[union-attr]
    )  # fmt: skip
    assert runs == as_expected + slower + faster + doubtful == 241
    assert as_expected >= 0.8 * (runs - doubtful)
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        doubted = {
            line
            for line, row in enumerate(csv.DictReader(file), start=2)
            if "flag:" in row["notes"]
        }
    named = {int(line) for line in re.findall(r"line (\d+): doubtful", text)}
    assert len(doubted) == 14
    assert named == doubted
