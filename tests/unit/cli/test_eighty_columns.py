"""Help, plans and progress fit 80 columns; -h, completion and bare names work."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main

from commands import SHARDWISE, rank_environment, run_installed
from shardwise.cli.find_run import run_or_name
from shardwise.cli.main import app

_PLANNED = ("plan", "--model", "qwen3-30b-a3b", "--cluster", "4x8xH100")
_FORMS: dict[str, list[str]] = {
    "plan": [],
    "set": ["--set", "memory.checkpoint_activations=full"],
}


def verbs(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [path, *(each for name, one in below.items() for each in verbs(one, (*path, name)))]


def too_wide(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > 80]


def test_every_help_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = verbs(typer.main.get_command(app))
    assert len(found) > 30
    for path in found:
        app([*path, "--help"], standalone_mode=False)
        assert not too_wide(capsys.readouterr().out), path


@pytest.mark.parametrize("form", _FORMS)
def test_a_plan_fits(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    app([*_PLANNED, *_FORMS[form]], standalone_mode=False)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if not line.startswith("warning: ")
    ]
    assert len(lines) > 5
    assert not too_wide("\n".join(lines))


def test_only_gpus_are_called_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    app(["plan", "--model", "tiny-llama", "--cluster", "2xCPU"], standalone_mode=False)
    text = capsys.readouterr().out
    assert not too_wide("\n".join(line for line in text.splitlines() if "warning: " not in line))
    assert "tok/s/gpu" not in text


def test_h_is_help_and_tab_completes(tmp_path: Path) -> None:
    assert "Examples:" in run_installed("plan", "-h").stdout
    environ = {
        **rank_environment(),
        "_SHARDWISE_COMPLETE": "complete_bash",
        "COMP_WORDS": "shardwise comp",
        "COMP_CWORD": "1",
    }
    done = subprocess.run([SHARDWISE], capture_output=True, text=True, check=False, env=environ)
    assert done.stdout.split() == ["compare"]


def test_a_bare_name_is_a_run_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert run_or_name("demo") == Path("runs/demo")
    assert run_or_name("runs/demo") == Path("runs/demo")
    assert run_or_name("absent") == Path("absent")
    for words in (["verify", "demo"], ["checkpoint", "ls", "demo"], ["profile", "demo"]):
        done = subprocess.run([SHARDWISE, *words], capture_output=True, text=True, check=False)
        assert "runs/demo" in done.stdout + done.stderr, words
