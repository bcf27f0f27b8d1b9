from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.files import free_name


def test_a_free_name_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "home-2").touch()
    monkeypatch.chdir(home)
    assert free_name(home) == tmp_path / "home-3"
    assert free_name(Path(".")) == tmp_path / "home-3"
    assert free_name(Path("run.yaml")) == Path("run-2.yaml")
    assert free_name(Path("/")) == Path("/copy-2")
