"""What `shardwise sites` refuses before it waits for anybody."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("127.0.0.1:0", "--sites", "0"), "--sites is 0"),
        (("127.0.0.1:0", "--sites", "1"), "--sites is 1"),
        (("127.0.0.1:0", "--patience", "nan"), "--patience is nan"),
        (("127.0.0.1", "--sites", "2"), "is not HOST:PORT"),
        (("127.0.0.1:0", "--replay", "none.jsonl"), "cannot be read as a record"),
    ],
)
def test_sites_that_cannot_meet_are_refused(
    words: tuple[str, ...], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, ["sites", *words]).exception
    assert isinstance(error, UserError) and what in error.what and error.fix
