"""One cell of benchmarks/links.py: two namespaces, a shaped link, two ranks on each side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from namespaces import why_not_here

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "links.py"


def namespaces() -> set[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


@pytest.mark.dist
@pytest.mark.long
def test_hybrid_shard_over_a_slow_link(tmp_path: Path) -> None:
    reason = why_not_here()
    if reason is not None:
        print(f"links are not measured: {reason}")
        pytest.skip(reason)
    before, out = namespaces(), tmp_path / "cells.json"
    cell = ("--bytes-only", "--speeds", "50", "--strategies", "hybrid_shard", "--layers", "2")
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *cell, "--steps", "4", "--json", str(out)],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    [found] = json.loads(out.read_text())
    # Bytes do not depend on how busy the machine is; seconds do, but for what the link takes.
    assert found["counted_bytes"] == pytest.approx(found["expected_bytes"], rel=0.03)
    assert found["measured_s"] > 0.9 * found["expected_bytes"] / (50e6 / 8)
    assert namespaces() == before
