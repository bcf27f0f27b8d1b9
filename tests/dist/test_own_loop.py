"""`parallelize` serves a loop that is not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import rank_environment, run_forked

pytestmark = pytest.mark.dist


def test_a_users_loop_learns_with_parallelize(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: tiny-llama\ncluster: 2xCPU\nshard:\n  strategy: full_shard\n")
    out = tmp_path / "out.txt"
    words = ("--standalone", "--nproc-per-node=2", "-m", "own_loop", config, out)
    environ = rank_environment() | {"PYTHONPATH": str(Path(__file__).parent)}
    run_forked(tmp_path, *words, module="torch.distributed.run", environ=environ)
    num_units, first, last = map(float, out.read_text().split())
    assert num_units == 6
    assert last < first - 1.0
