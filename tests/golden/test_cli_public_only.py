"""The off switch of everything that is private to torch and transformers, in real runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.internals.parts import (
    CHANGES,
    GATHERS,
    POSITIONS,
    PUBLIC_ONLY,
    REDUCTIONS,
    Part,
)

pytestmark = pytest.mark.dist
Run = Callable[..., subprocess.CompletedProcess[str]]
Losses = Callable[[Path], dict[int, float]]
CONFIG = """\
model: tiny-llama
data: {source: synthetic, seq_len: 32}
train: {steps: 4, global_batch: 4, accumulation: 2}
memory: {checkpoint_activations: selective}
observe: {log_every: 1}
"""


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        pytest.param(["cluster=1xCPU"], [REDUCTIONS], id="one rank", marks=pytest.mark.long),
        pytest.param(
            ["cluster=2xCPU", "shard.gather_in_place=true", "observe.collectives=false"],
            [GATHERS],
            id="in place, no timer",
        ),
    ],
)
def test_a_run_by_public_paths_has_the_same_losses_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shardwise: Run,
    losses_of: Losses,
    words: list[str],
    parts: list[Part],
) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    line = [str(tmp_path / "run.yaml"), f"runs_dir={tmp_path}", *words]
    private = shardwise("train", *line, "name=private")
    monkeypatch.setenv(PUBLIC_ONLY, "1")
    public = shardwise("train", *line, "name=public")
    said = [text for text in public.stdout.splitlines() if text.startswith("public paths")]
    assert len(said) == 1
    assert f"({PUBLIC_ONLY} is set)" in said[0]
    assert all(part.name in said[0] for part in (*parts, CHANGES, POSITIONS))
    assert "public paths" not in private.stdout
    # Bit by bit: the private parts move bytes, and compute nothing.
    assert losses_of(tmp_path / "public") == losses_of(tmp_path / "private")
