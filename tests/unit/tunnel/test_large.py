"""A large world costs no time and no memory: 512 ranks, blocks of 3.2B parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import rank_environment, run_forked

CODE = """
import resource, sys
from shardwise.cli.main import app
app(sys.argv[1:], standalone_mode=False)
used = resource.getrusage(resource.RUSAGE_SELF)
# Its own peak: what getrusage says begins with that of the process that started it.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
sys.stderr.write(f"used {used.ru_utime} {status['VmHWM'].split()[0]}")
"""
NUM_LAYERS = 4
# The whole model has 126 blocks and must stay below 60 s and 4 GiB; it takes 32 s and 0.43 GiB. The
# limit of time is for a CPU that is several times slower.
MAX_CPU_S, MAX_BYTES = 120.0, 2**30


@pytest.mark.slow
def test_512_ranks_in_seconds(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: llama-3.1-405b\ndata: synthetic\ncluster: 64x8xH100\n")
    settings = (f"model.overrides.num_hidden_layers={NUM_LAYERS}", "shard.strategy=full_shard")
    (tmp_path / "measured.py").write_text(CODE)
    environ = rank_environment() | {"PYTHONPATH": str(tmp_path)}
    words = ("tunnel", file, *settings, "--device", "fake", "--json")
    done = run_forked(tmp_path, *words, module="measured", environ=environ)
    found = json.loads(done.stdout)
    params = 2 * 128256 * 16384 + 16384 + NUM_LAYERS * 3_187_703_808
    assert found["world_size"] == 512
    # 128256 rows do not divide by 512, so rank 0 holds half a row more of both ends.
    assert found["largest_memory"]["params"] == pytest.approx(4 * params / 512, rel=1e-3)
    assert {row["kind"]: row["count"] for row in found["collectives"]} == {
        "all_gather": 2 * (NUM_LAYERS + 2) - 2,
        "reduce_scatter": NUM_LAYERS + 2,
        "all_reduce": 3,
    }
    cpu_s, max_rss = done.stderr.split("used ")[-1].split()
    assert float(cpu_s) < MAX_CPU_S
    assert int(max_rss) * 1024 < MAX_BYTES
