from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli import config as config_cli
from shardwise.config.schema_text import markdown_reference
from shardwise.errors import UserError


@pytest.fixture(autouse=True)
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "examples"
    directory.mkdir()
    (directory / "quickstart.yaml").write_text("# A first run on a laptop.\nmodel: tiny-llama\n")
    (directory / "bare.yaml").write_text("model: tiny-llama\n")
    monkeypatch.setattr(config_cli, "EXAMPLES_DIR", directory)
    monkeypatch.chdir(tmp_path)
    return directory


def output_of(*words: str) -> str:
    result = CliRunner().invoke(config_cli.app, list(words), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def refusal_of(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(config_cli.app, list(words), catch_exceptions=False)
    assert caught.value.fix
    return str(caught.value)


def test_ls_names_models_and_examples() -> None:
    output = output_of("ls")
    assert "tiny-llama" in output
    assert "quickstart  A first run on a laptop." in output


def test_cp_copies_and_names_the_next_command() -> None:
    assert "shardwise plan run.yaml" in output_of("cp", "quickstart", "run.yaml")
    assert Path("run.yaml").read_text().endswith("model: tiny-llama\n")


def test_cp_into_a_directory_keeps_the_name() -> None:
    Path("runs").mkdir()
    output_of("cp", "bare.yaml", "runs")
    assert Path("runs/bare.yaml").exists()


def test_cp_never_overwrites() -> None:
    Path("run.yaml").write_text("mine")
    assert "exists already" in refusal_of("cp", "quickstart", "run.yaml")
    assert Path("run.yaml").read_text() == "mine"


def test_cp_names_the_nearest_example() -> None:
    assert "did you mean quickstart?" in refusal_of("cp", "quikstart", "run.yaml")
    assert "shardwise config ls" in refusal_of("cp", "zzz", "run.yaml")


def test_cp_needs_a_directory_that_exists() -> None:
    assert "cannot be written" in refusal_of("cp", "bare", "nowhere/run.yaml")


def test_schema_prints_json_markdown_a_section_or_a_field() -> None:
    assert json.loads(output_of("schema"))["additionalProperties"] is False
    assert output_of("schema", "--markdown").strip() == markdown_reference().strip()
    assert output_of("schema", "optim.lr").startswith("optim.lr\n  Peak learning rate.")
    assert "optim.schedule" in output_of("schema", "optim")
    assert max(map(len, output_of("schema", "optim").splitlines())) <= 80
    assert "Name of the run directory" in output_of("schema", "name")


@pytest.mark.parametrize(
    ("field", "says"),
    [("optim.lrr", "`lr`"), ("lr", "optim.lr"), ("optm.lr", "`optim`"), ("", "a file takes")],
)
def test_schema_of_an_unknown_field_names_the_nearest(field: str, says: str) -> None:
    assert says in refusal_of("schema", field)


def test_no_verb_imports_torch() -> None:
    code = (
        "import sys; from shardwise.cli.config import app; app(['ls'], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
