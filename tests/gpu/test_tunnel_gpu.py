"""The tunnel on a real GPU: waits last as long as asked, and slow links are felt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.tunnel.link_clock import CudaClock

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device: nothing here was tested"
)

CONFIG = """\
model: {name: llama-3.2-1b, overrides: {num_hidden_layers: 4}}
data: {source: synthetic, seq_len: 1024}
train: {micro_batch: 4}
shard: {strategy: full_shard}
memory: {compile: false}
"""
Tunnel = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tunnel(tmp_path_factory: pytest.TempPathFactory) -> Tunnel:
    file = Path(tmp_path_factory.mktemp("tunnel")) / "run.yaml"
    file.write_text(CONFIG)

    def run(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["tunnel", str(file), *words, "--steps", "4", "--json"])
        if done.exception is not None:
            raise done.exception
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


@pytest.fixture(scope="module")
def eight(tunnel: Tunnel) -> dict[str, Any]:
    return tunnel("--cluster", "8xH100")


def test_waits_last_as_long_as_asked() -> None:
    clock = CudaClock()
    source = torch.randn(2**24, device="cuda")
    target = torch.empty_like(source)
    for seconds in (0.0, 0.005, 0.005, 0.005):
        for _ in range(8):
            clock.carry("wire", "copy", seconds, lambda: target.copy_(source))
        clock.finish()
        spent = clock.settle()
    assert spent.took_s == pytest.approx(8 * 0.005, rel=0.05)


def test_a_step_is_measured(eight: dict[str, Any]) -> None:
    assert eight["mode"] == "gpu"
    assert 0 < eight["free_step_s"] <= 1.05 * eight["step_s"]
    assert eight["tokens_per_s_per_gpu"] == pytest.approx(4 * 1024 / eight["step_s"])
    assert eight["emulated_s"] == pytest.approx(eight["communication_s"], rel=0.25)
    assert eight["peak_allocated_bytes"] <= eight["peak_reserved_bytes"]


def test_states_and_collectives_are_those_of_fake_tensors(
    tunnel: Tunnel, eight: dict[str, Any]
) -> None:
    fake = tunnel("--cluster", "8xH100", "--device", "fake")
    for states in ("params", "grads", "optimizer"):
        assert eight["largest_memory"][states] == fake["largest_memory"][states]
    assert eight["sequence"] == [item for item in fake["sequence"] if item["unit"]]
    # Eager on both sides; the allocator rounds up, and kernels have workspaces.
    assert eight["peak_allocated_bytes"] == pytest.approx(fake["peak_allocated_bytes"], rel=0.1)


def test_slow_links_are_exposed_and_fast_ones_hidden(tunnel: Tunnel, eight: dict[str, Any]) -> None:
    slow = tunnel("--cluster", "8xH100", "--link-speed", "0.01")
    assert slow["exposed_s"] > 10 * eight["exposed_s"]
    # What compute hides is at most the compute there is.
    least = slow["communication_s"] - slow["free_step_s"]
    assert slow["exposed_s"] > 0.8 * least
    assert slow["emulated_s"] == pytest.approx(slow["communication_s"], rel=0.1)


def test_replicas_and_compiled_blocks(tunnel: Tunnel) -> None:
    settings = ("shard.strategy=hybrid_shard", "memory.compile=true")
    found = tunnel("--cluster", "2x8xH100", *settings)
    across = [row for row in found["collectives"] if row["stride"] == 8]
    assert [(row["kind"], row["ranks"], row["count"]) for row in across] == [("all_reduce", 2, 5)]
    assert found["mfu"] is None or 0 < found["mfu"] < 1
