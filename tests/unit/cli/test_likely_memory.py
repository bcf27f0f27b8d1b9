"""The range of memory that `shardwise plan` calls likely."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHARDWISE = Path(sys.executable).with_name("shardwise")


@pytest.mark.parametrize(
    ("model", "is_mixture"), [("qwen3-30b-a3b", True), ("mixtral-8x7b", True), ("qwen3-8b", False)]
)
def test_a_mixture_says_that_uneven_experts_change_nothing(
    model: str, tmp_path: Path, *, is_mixture: bool
) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {model}\ndata: synthetic\ncluster: 2x8xH200\n")
    command = [str(SHARDWISE), "plan", "run.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    (_, total) = " ".join(done.stdout.split()).split(" total ", 1)
    total = total.split("speed and cost")[0]
    assert " likely" in total
    assert ("likely, however uneven the experts are" in total) == is_mixture
