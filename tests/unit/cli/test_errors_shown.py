from __future__ import annotations

import sys

import pytest

from shardwise.cli.main import main


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("columns", ["0", "1", "80", "["])
def test_an_error_is_shown_however_wide_the_terminal_is(
    columns: str,
    is_terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", "plan", "nowhere.yaml"])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "nowhere.yaml" in capsys.readouterr().err
