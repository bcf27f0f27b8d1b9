"""Every command that the pages show is one that there is, with its options and its settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from shardwise.cli.main import app
from shardwise.config.schema_text import field_path, field_types

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# In a line of its own or between backquotes.
_COMMAND = re.compile(r"(?:^ *(?:\$ )?|`)(shardwise [a-z][^`\n]*)", re.MULTILINE)
_SETTINGS = {
    field_path(section, name) for section, names in field_types().items() for name in names
}


def commands_of(page: Path) -> list[list[str]]:
    found = []
    for text in _COMMAND.findall(page.read_text(encoding="utf-8")):
        words = re.split(r" [|>&] |;| +#|\\$", text)[0].replace("'", "").split()
        # A sentence begins with the name too.
        if not re.match(r"shardwise (trains|uses) ", text):
            found.append(words[1:])
    return found


def faults(words: list[str]) -> list[str]:
    command: Any = typer.main.get_command(app)
    path: list[str] = []
    while words and words[0] in getattr(command, "commands", {}):
        path, command, words = [*path, words[0]], command.commands[words[0]], words[1:]
    if hasattr(command, "commands"):
        # Several verbs at once, as in `shardwise checkpoint ls|verify`.
        verbs = words[0].split("|") if words else []
        return [f"no verb {verb}" for verb in verbs if verb not in command.commands]
    # torchrun's parser is PyTorch's.
    if path == ["torchrun"]:
        return []
    known = {"--help", *(one for option in command.params for one in option.opts)}
    known |= {one for option in command.params for one in option.secondary_opts}
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    settings = re.findall(r"(?:^| )([a-z_]+\.[a-z_]+)[.=]", " ".join(words))
    return [
        *(f"no option {option}" for option in options if option not in known),
        *(f"no setting {setting}" for setting in settings if setting not in _SETTINGS),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_can_be_typed(page: Path) -> None:
    found = {" ".join(words): faults(words) for words in commands_of(page)}
    assert not {command: wrong for command, wrong in found.items() if wrong}


def test_what_there_is_not_is_found() -> None:
    assert faults(["trian", "run.yaml"]) == ["no verb trian"]
    assert faults(["checkpoint", "ls|verfy"]) == ["no verb verfy"]
    assert faults(["plan", "run.yaml", "--for=fewest", "--fro"]) == ["no option --fro"]
    assert faults(["train", "run.yaml", "optim.rl=1"]) == ["no setting optim.rl"]
    assert sum(len(commands_of(page)) for page in PAGES) > 150
