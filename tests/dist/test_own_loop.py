"""`parallelize` serves a loop that is not ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


def test_a_users_loop_learns_with_parallelize(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: tiny-llama\ncluster: 2xCPU\nshard:\n  strategy: full_shard\n")
    out = tmp_path / "out.txt"
    script = Path(__file__).parent / "own_loop.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(script), str(config), str(out)], check=True, env=environ)
    num_units, first, last = map(float, out.read_text().split())
    assert num_units == 6
    assert last < first - 1.0
