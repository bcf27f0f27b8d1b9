"""The files of `benchmarks/loading.py`, whose data is a hole, and what it says of a load."""

from __future__ import annotations

import json
from pathlib import Path

from loading import said_of, write_files
from shardwise.facts.presets import PRESETS
from shardwise.model.boxes import Box
from shardwise.model.stored import open_weights


def test_holes_are_whole_files_of_weights(tmp_path: Path) -> None:
    total = write_files(tmp_path, PRESETS["tiny-llama"], 3)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) > total
    assert sum(512 * file.stat().st_blocks for file in files) < total / 4
    weights = open_weights(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    rows, columns = weights.shape(name)
    part = weights.read(name, Box((rows // 2, 0), (rows // 2, columns)))
    assert part.shape == (rows // 2, columns) and not part.any()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama"


def test_a_load_that_was_cut_off_says_what_was_read() -> None:
    found = {
        **{"model": "m", "base": "nf4", "whole_gib": 100.0, "read_gib": 25.0, "seconds": 50.0},
        **{f"{name}_gib": 3.0 for name in ("peak", "anonymous", "file")},
        **{f"{name}_before_gib": 1.0 for name in ("peak", "anonymous", "file")},
    }
    said = said_of({**found, "problem": "the time was up"})
    assert said.startswith("m as nf4: 25.0 GiB read, 25%, 0.50 GiB/s; host memory at most: peak")
    assert said.endswith("file 3.00 GiB (1.00 before); the time was up")
    assert said_of({"problem": "out of memory"}) == "out of memory"
