from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.facts.presets import PRESETS


def loaded_after(code: str, cwd: Path) -> set[str]:
    """Which of the heavy libraries a fresh interpreter holds after `code`."""
    report = "import sys; sys.stderr.write(' '.join({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=cwd,
    )
    return set(done.stderr.split())


def test_importing_the_command_line_loads_no_torch(tmp_path: Path) -> None:
    assert loaded_after("import shardwise.cli.main", tmp_path) == set()


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("--json",),
        ("--cluster", "4x8xH100"),
        ("model.attention=eager",),
        ("--html", "plan.html", "shard.strategy=full_shard"),
    ],
)
def test_planning_loads_no_torch(tmp_path: Path, extra: tuple[str, ...]) -> None:
    (tmp_path / "run.yaml").write_text("model: llama-3.1-8b\ndata: synthetic\ncluster: 8xH100\n")
    words = ["plan", "run.yaml", *extra]
    code = f"from shardwise.cli.main import app; app({words!r}, standalone_mode=False)"
    assert loaded_after(code, tmp_path) == set()


def test_comparing_loads_no_torch(tmp_path: Path) -> None:
    words = ["compare", "--model", "qwen3-30b-a3b", "--cluster", "2x8xH800", "--ep", "8"]
    words += ["--tokens-per-s", "4000"]
    code = f"from shardwise.cli.main import app; app({words!r}, standalone_mode=False)"
    assert loaded_after(code, tmp_path) == set()


@pytest.mark.parametrize(
    "presets",
    [list(PRESETS)[::4], pytest.param(list(PRESETS), marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_planning_any_preset_loads_no_torch(presets: list[str], tmp_path: Path) -> None:
    # Without torch a plan takes less than a second. With it the import alone takes longer.
    # A search takes half a second for each of them, so most of it is decided here.
    words = "data: {source: synthetic, seq_len: 1024}\ncluster: 256x8xB200\n"
    words += "train: {micro_batch: 1}\nmemory: {checkpoint_activations: full}\n"
    words += "shard: {strategy: full_shard}\n"
    (tmp_path / "run.yaml").write_text(words)
    # DeepSeek-V3 does not fit without expert parallelism, and its plan says so without torch too.
    code = f"""
from shardwise.cli.main import app
from shardwise.errors import UserError
for name in {presets!r}:
    try:
        app(["plan", "run.yaml", f"model={{name}}"], standalone_mode=False)
    except UserError as error:
        assert name == "deepseek-v3" and "does not fit" in str(error), error
"""
    assert loaded_after(code, tmp_path) == set()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "shardwise config cp demo run.yaml"),
        (("train",), "shardwise train run.yaml train.steps=2000"),
        (("plan",), "shardwise plan run.yaml --cluster 4x8xH100"),
        (("tunnel",), "shardwise tunnel run.yaml --cluster 4x8xH100 --link-speed 0.5"),
        (("report",), "shardwise report runs/a runs/b --to compare.html"),
        (("config",), "examples"),
        (("config", "cp"), "shardwise config cp NAME run.yaml"),
        (("config", "schema"), "shardwise config schema optim.lr"),
        (("observe", "rules"), "shardwise observe rules --to rules.yaml"),
        (("observe", "scrape"), "shardwise observe scrape --on kubernetes"),
    ],
)
def test_help_shows_examples(words: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0
    assert says in " ".join(done.stdout.split())
