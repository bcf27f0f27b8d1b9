"""The lines after a run can be typed where the run was started, and do what they say."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.cli.next_steps import next_lines
from shardwise.config.load import load_config
from shardwise.launch.prepare import choose_plan

FILE = "my runs/a b.yaml"
TEXT = "model: tiny-llama\ncluster: 2xCPU\ntrain: {steps: 8, stop_after: 4}\n"


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path(FILE).parent.mkdir()
    Path(FILE).write_text(TEXT)


def lines_after(step: int, *overrides: str) -> list[str]:
    plan = choose_plan(load_config(FILE, overrides), {})
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    return list(next_lines(plan, FILE, overrides, step))


def words_of(line: str) -> list[str]:
    program, *words = shlex.split(line.removeprefix("next: ").split("   (")[0])
    assert program == "shardwise"
    return words


def shardwise(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwise", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_a_run_that_stopped_goes_on_with_the_same_changes() -> None:
    [line] = lines_after(4, "optim.lr=1e-3", "train.stop_after=4", "name=a b")
    verb, file, *overrides = words_of(line)
    assert (verb, file) == ("train", FILE)
    config = load_config(file, overrides)
    assert config.train.stop_after is None
    assert (config.optim.lr, config.name) == (1e-3, "a b")
    assert "(goes on at step 4)" in line


def test_every_command_after_a_whole_run_works(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("llama-3.1-8b-8xh100.yaml").write_text("taken")
    lines = lines_after(8, "train.stop_after=null", "name=done", "optim.lr=1e-3")
    commands = [words_of(line.strip()) for line in lines]
    assert [words[0] for words in commands] == ["report", "train", "config", "config"]
    assert commands[0] == ["report", "runs/done"]
    _, file, *overrides = commands[1]
    config = load_config(file, overrides)
    assert (config.name, config.train.steps, config.optim.lr) == ("done-2", 16, 1e-3)
    assert shardwise(monkeypatch, "plan", file, *overrides) == 0
    for words in commands[2:]:
        assert shardwise(monkeypatch, *words) == 0
    assert shardwise(monkeypatch, "plan", commands[2][-1]) == 0


def test_inside_torchrun_its_command_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    [line] = lines_after(4)
    assert line.startswith("next: the same torchrun command with train.stop_after=null   (goes on")
    assert not any(" train " in line for line in lines_after(8, "train.stop_after=null"))
