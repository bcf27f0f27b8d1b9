"""`optim.name` through the command: ranks have the numbers of one process, and runs resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

Run = Callable[..., Any]
CONFIG = """\
model: {name: tiny-llama, overrides: {num_hidden_layers: 1, hidden_size: 64, intermediate_size: 91,
  num_attention_heads: 2, num_key_value_heads: 2, head_dim: 32}}
data: {source: text, path: some.txt, seq_len: 64, tokenizer: byte}
cluster: 1xCPU
shard: {strategy: full_shard}
precision: {param: fp32}
train: {steps: 4, global_batch: 4}
optim: {lr: 3e-3}
observe: {log_every: 1}
"""
# Two ranks have as many of its channels each.
EVEN = "model.overrides.intermediate_size=92"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizers")
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "some.txt").write_text("".join(f"{n} squared is {n * n}\n" for n in range(400)))
    return folder


@pytest.mark.dist
@pytest.mark.parametrize(
    "name", ["muon", *(pytest.param(n, marks=pytest.mark.long) for n in ("adafactor", "lion"))]
)
def test_ranks_have_the_losses_of_one_process_and_resume(
    shardwise: Run, folder: Path, name: str, losses_of: Callable[[Path], dict[int, float]]
) -> None:
    # Sizes that two ranks do not divide evenly have padded shards.
    one, two = (f"name={name}-{count}" for count in ("one", "two"))
    shardwise("train", "run.yaml", one, f"optim.name={name}", cwd=folder)
    losses = losses_of(folder / "runs" / f"{name}-one")
    assert losses[4] < losses[1]
    words = (two, "cluster=2xCPU", f"optim.name={name}")
    shardwise("train", "run.yaml", *words, "train.stop_after=2", cwd=folder)
    assert (
        "1 verified, 0 damaged"
        in shardwise("checkpoint", "verify", f"runs/{name}-two", cwd=folder).stdout
    )
    # The state of two ranks is read by one.
    shardwise("train", "run.yaml", two, f"optim.name={name}", cwd=folder)
    assert losses_of(folder / "runs" / f"{name}-two") == pytest.approx(losses, rel=1e-5)
    done = shardwise("train", "run.yaml", one, "train.steps=5", cwd=folder, expect=2)
    assert f"holds checkpoints with optim.name={name}, and this run has adamw" in done.stderr
    saved = sum(f.stat().st_size for f in (folder / "runs" / f"{name}-one").rglob("rank-*.bin"))
    run = shardwise("plan", "run.yaml", f"optim.name={name}", "--json", cwd=folder).stdout
    assert json.loads(run)["run"]["checkpoint_bytes"] == pytest.approx(saved, rel=0.1)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ("tensor", [EVEN]),
        pytest.param(
            "expert",
            ["model.name=tiny-mixtral", EVEN, "train.router_aux_loss=0"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pipeline",
            ["model.overrides.num_hidden_layers=2", "train.accumulation=2"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_lion_moves_parts_of_matrices_as_one_process_moves_the_whole(
    shardwise: Run,
    folder: Path,
    axis: str,
    words: list[str],
    losses_of: Callable[[Path], dict[int, float]],
) -> None:
    words = [*words, "optim.name=lion", "optim.betas=[0.9,0.99]", "optim.lr=1e-3"]
    shardwise("train", "run.yaml", f"name=lion-{axis}-one", *words, cwd=folder)
    divided = (f"name=lion-{axis}-two", f"mesh.{axis}=2", "cluster=2xCPU")
    shardwise("train", "run.yaml", *divided, *words, cwd=folder)
    one, two = (losses_of(folder / "runs" / f"lion-{axis}-{count}") for count in ("one", "two"))
    assert one[4] < one[1] and two == pytest.approx(one, rel=1e-5)


def test_a_plan_knows_the_state_of_each_optimizer(shardwise: Run, folder: Path) -> None:
    held = {}
    for name in ("adamw", "muon", "adafactor", "lion"):
        words = (
            "model=llama-3.1-8b",
            "cluster=8xH100",
            "data.tokenizer=byte",
            "train.global_batch=8",
        )
        said = shardwise(
            "plan",
            "run.yaml",
            *words,
            "model.overrides={}",
            f"optim.name={name}",
            "--json",
            cwd=folder,
        ).stdout
        held[name] = (
            json.loads(said)["memory"]["optimizer"] / json.loads(said)["model"]["total_params"]
        )
    assert held["adamw"] == pytest.approx(8 / 8, rel=0.01)
    # Seven of eight billion parameters are matrices of blocks.
    assert held["muon"] == pytest.approx((7 * 4 + 1.05 * 8) / 8.05 / 8, rel=0.03)
    assert held["adafactor"] < 0.01
    assert held["lion"] == pytest.approx(4 / 8, rel=0.01)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optim.state=int8"], "optim.name=muon keeps its state in fp32"),
        (["optim.fused=true"], "optim.name=muon has no fused kernel"),
        (["memory.offload=cpu"], "optim.name=muon updates parameters on the device"),
        (["memory.offload_optimizer=true"], "has no moments that come in pages"),
        (
            ["mesh.tensor=2", "cluster=2xCPU", EVEN],
            "with several ranks along `tensor` was not tried",
        ),
        (["optim.name=adafactor", "optim.betas=[0.8,0.9]"], "optim.name=adafactor has no such"),
        (["optim.name=lion", "optim.eps=1e-6"], "optim.name=lion has no such number"),
    ],
)
def test_what_was_not_tried_with_another_optimizer_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    said = refused(folder, monkeypatch, ["optim.name=muon", *words])
    assert says in said and "fix: " in said


def test_the_tunnel_says_what_it_does_not_run(shardwise: Run, folder: Path) -> None:
    words = ("tunnel", "run.yaml", "--cluster", "2xCPU", "optim.name=muon")
    said = shardwise(*words, cwd=folder, expect=2).stderr
    assert "the tunnel runs no optim.name=muon" in said and "fix: write optim.name=adamw" in said


def test_the_tunnel_holds_lions_one_moment(shardwise: Run, folder: Path) -> None:
    words = ("tunnel", "run.yaml", "--cluster", "2xCPU", "--device", "fake", "--json")
    found = json.loads(shardwise(*words, "optim.name=lion", cwd=folder).stdout)
    for memory in (found["memory"], found["planned_memory"]):
        assert memory["optimizer"] == memory["params"] > 0
