"""What the command says of a configuration before it starts a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.launch.preflight import validate_run
from shardwise.launch.prepare import choose_plan


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> str:
    """The error of the folder's run.yaml with these changes."""
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as caught:
        validate_run(choose_plan(load_config("run.yaml", ["name=refused", *words])))
    return " ".join(str(caught.value).split())
