"""Help, plans and progress fit 80 columns; -h, completion and bare names work."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer.main

from commands import SHARDWISE, rank_environment, run_installed
from shardwise.cli import checkpoint, export, generate, profile
from shardwise.cli.find_run import run_or_name
from shardwise.cli.main import app
from shardwise.errors import UserError

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


TAKE_A_RUN = {
    "status": ["demo"],
    "logs": ["demo"],
    "attach": ["demo"],
    "stop": ["demo"],
    "exclude": ["demo", "node7"],
    "report": ["demo"],
    "verify": ["demo"],
    "doctor": ["demo"],
    "checkpoint ls": ["demo"],
    "checkpoint verify": ["demo"],
    "checkpoint prune": ["demo", "--keep", "1"],
    "ui": ["demo", "--host", "10.0.0.1"],
}
# They import torch, so the option's own parser is looked at.
BY_PARSER: dict[str, Callable[..., None]] = {
    "checkpoint sign": checkpoint.sign_run,
    "export": export.export,
    "generate": generate.generate,
    "profile": profile.profile,
}


def test_every_verb_that_takes_a_run_takes_a_name() -> None:
    """A new one is added to the list above."""
    found = set()
    for path in verbs(typer.main.get_command(app)):
        command: Any = typer.main.get_command(app)
        for word in path:
            command = command.commands[word]
        for option in command.params:
            says = getattr(option, "help", None) or ""
            if re.search(r"\b[Rr]un(s|s? director\w+)?\b.*\bnames?\b", says):
                found.add(" ".join(path))
    assert found == {*TAKE_A_RUN, *BY_PARSER}
    for verb in BY_PARSER.values():
        hints = get_type_hints(verb, include_extras=True).values()
        infos = [info for hint in hints for info in getattr(hint, "__metadata__", ())]
        assert run_or_name in [getattr(info, "parser", None) for info in infos], verb


@pytest.mark.parametrize("verb", TAKE_A_RUN)
def test_a_name_means_the_run_under_runs(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same is said of the name as of the path, and nothing of a path that is not there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "plan.json").write_text("{")
    said = []
    for given in ("demo", "runs/demo"):
        words = [given if word == "demo" else word for word in TAKE_A_RUN[verb]]
        try:
            app([*verb.split(), *words], standalone_mode=False)
            told = ""
        except (UserError, typer.Exit) as end:
            told = str(end)
        said.append(told + capsys.readouterr().out)
    assert said[0] == said[1]
    assert not re.search(r"\bno (run|file|directory)\b.* demo\b", said[0])


def test_every_command_has_h(capsys: pytest.CaptureFixture[str]) -> None:
    for path in verbs(typer.main.get_command(app)):
        if path != ("torchrun",):  # torchrun's own parser has it
            app([*path, "-h"], standalone_mode=False)
            told = capsys.readouterr().out
            assert told.startswith("Usage: ")
            assert " ".join(path) in told.splitlines()[0]


def test_a_bare_name_is_a_run_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert run_or_name("demo") == Path("runs/demo")
    assert run_or_name("runs/demo") == Path("runs/demo")
    assert run_or_name("absent") == Path("absent")
