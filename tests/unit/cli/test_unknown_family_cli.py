"""A model_type that transformers does not know, as the command answers it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError, brief


def test_an_unknown_family_is_a_few_lines_with_near_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama", "hidden_size": 8}))
    (tmp_path / "run.yaml").write_text(f"model: {tmp_path}\ndata: stdlib\ncluster: 1xCPU\n")
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(
            app, ["plan", str(tmp_path / "run.yaml")], catch_exceptions=False, standalone_mode=False
        )
    text = str(caught.value)
    assert len(text) < 600 and len(text.splitlines()) <= 4
    assert "'lama'" in text and "nearest names are llama" in text and "knows 0" not in text


@pytest.mark.parametrize("said", ["", "one\ntwo", "word " * 2000])
def test_what_a_library_says_is_cut(said: str) -> None:
    assert len(brief(ValueError(said))) < 300 and "\n" not in brief(ValueError(said))
