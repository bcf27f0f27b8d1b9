"""Rank 0 with real tensors on the host: the path that a GPU takes, with a clock that sleeps."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commands import run_forked
from shardwise.cli.main import app
from shardwise.errors import ExitCode, UserError
from shardwise.facts.probe import probe_cpu
from shardwise.tunnel.timed import TRACED_STEPS, WARM_UP_STEPS, _Stand

Tunnel = Callable[..., dict[str, Any]]
SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
ON_CPU = ("--device", "cpu", "--cluster", "2xCPU", "--steps", "2", "precision.param=fp32")


class PlayedTime:
    """A clock that only sleep moves: compute takes a millionth of a second."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(scope="module")
def slow(tunnel: Tunnel) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.tunnel.link_clock.time", PlayedTime())
        return tunnel(*ON_CPU, "--link-speed", "0.0005")


def test_slow_links_are_felt(slow: dict[str, Any]) -> None:
    assert slow["mode"] == "cpu"
    assert slow["communication_s"] > 0.2
    assert slow["emulated_s"] >= slow["communication_s"]
    # Nothing overlaps on a host, so a step is longer by all of it.
    assert slow["exposed_s"] == pytest.approx(slow["communication_s"], rel=1e-3)
    assert slow["step_s"] == pytest.approx(slow["free_step_s"] + slow["exposed_s"])
    assert slow["tokens_per_s_per_gpu"] == pytest.approx(2 * 16 / slow["step_s"])
    assert slow["mfu"] is None
    assert any("nothing overlaps" in note for note in slow["notes"])


def test_links_of_infinite_speed_are_measured_once(
    tunnel: Tunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    run = _Stand.run
    monkeypatch.setattr(_Stand, "run", lambda stand, num: passes.append(num) or run(stand, num))
    found = tunnel(*ON_CPU, "--link-speed", "inf")
    assert passes == [WARM_UP_STEPS, 2]
    assert found["link_speed"] is None
    assert found["step_s"] == found["free_step_s"]
    assert found["communication_s"] == found["exposed_s"] == 0
    assert found["collectives"]


def test_real_steps_make_the_collectives_of_fake_ones(tunnel: Tunnel, slow: dict[str, Any]) -> None:
    fake = tunnel("--device", "fake", "--cluster", "2xCPU", "precision.param=fp32")
    named = [item for item in fake["sequence"] if item["unit"]]
    assert [{**item, "seconds": 0} for item in slow["sequence"]] == [
        {**item, "seconds": 0} for item in named
    ]
    for states in ("params", "grads", "optimizer"):
        assert slow["largest_memory"][states] == fake["largest_memory"][states]


def test_a_trace_shows_what_the_links_took(tunnel: Tunnel, tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    found = tunnel(*ON_CPU, "--link-speed", "0.0005", "--trace", str(path))
    assert found["trace"] == str(path)
    done = CliRunner().invoke(app, ["profile", str(path), "--json"])
    assert done.exit_code == 0, done.output
    profile = json.loads(done.stdout)
    assert (profile["world_size"], len(profile["steps"])) == (2, TRACED_STEPS)
    calls: dict[str, float] = {}
    for row in profile["collectives"]:
        calls[row["name"]] = calls.get(row["name"], 0) + row["calls"]
        assert row["unit"] != "-"
    kinds = {row["kind"]: row["count"] for row in found["collectives"]}
    assert calls == kinds
    # A step's collectives sleep for as long as the links would take, and nothing runs beside them.
    # A busy machine wakes them late, and computes slowly.
    summary = profile["summary"]
    assert summary["communication_s"] >= found["communication_s"]
    exposed_s = summary["exposed_share"] * summary["step_s"]
    assert exposed_s == pytest.approx(summary["communication_s"], rel=0.01)


def test_replicas_and_recompute_run_too(tunnel: Tunnel) -> None:
    settings = ("shard.strategy=hybrid_shard", "memory.checkpoint_activations=full")
    found = tunnel(*ON_CPU, "--cluster", "2x2xCPU", "train.accumulation=2", *settings)
    kinds = {(row["kind"], row["ranks"], row["stride"]): row for row in found["collectives"]}
    assert kinds["all_reduce", 2, 2]["count"] == 4
    assert kinds["reduce_scatter", 2, 1]["count"] == 4
    assert kinds["all_gather", 2, 1]["count"] == 12


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_what_blocks_exchange_takes_its_time_too(tunnel: Tunnel, axis: str) -> None:
    words = ("--cluster", "4xCPU", "precision.param=fp32", f"mesh.{axis}=2")
    slow = tunnel(*words, "--device", "cpu", "--steps", "1", "--link-speed", "0.01")
    fake = tunnel(*words, "--device", "fake")
    names = ("kind", "num_bytes", "ranks", "stride", "unit")
    real, counted = (
        Counter(tuple(item[name] for name in names) for item in found["sequence"])
        for found in (slow, fake)
    )
    assert not real - counted
    assert any(not unit for *_, unit in real)
    # What is left are numbers that ranks agree on, copies' gradients and the loss's sums.
    exchanged = {kind for kind, *_, unit in real if not unit}
    assert exchanged >= ({"reduce_scatter"} if axis == "tensor" else {"all_to_all"})
    assert slow["emulated_s"] >= slow["communication_s"]


def test_experts_of_other_ranks_get_rows_of_this_one(
    tunnel: Tunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which expert computes a token depends on all tokens here, so a trial would say that a token
    sees later ones."""
    monkeypatch.delattr("shardwise.training.session.validate_trainable")
    sizes = {"num_experts": 8, "moe_intermediate_size": 32}
    experts = [f"model.overrides.{name}={size}" for name, size in sizes.items()]
    words = ("--device", "cpu", "--cluster", "2xCPU", "--steps", "1", "precision.param=fp32")
    found = tunnel(*words, "model.name=qwen3-30b-a3b", *experts, "mesh.expert=2")
    kinds = {row["kind"]: row["count"] for row in found["collectives"]}
    assert kinds["all_to_all"] == 2 * 6
    assert found["step_s"] > 0


def test_tokens_are_rows_of_the_first_part_of_a_vocabulary(
    tunnel: Tunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other ranks would be zeros, and norms of zeros have gradients without bounds."""
    seen: list[int] = []
    step = _Stand._step

    def look(stand: _Stand, batches: list[Any]) -> None:
        seen.extend(int(batch.inputs.max()) for batch in batches)
        step(stand, batches)

    monkeypatch.setattr(_Stand, "_step", look)
    words = ("--cluster", "2xCPU", "precision.param=fp32", "mesh.tensor=2", "--link-speed", "inf")
    tunnel(*words, "--device", "cpu", "--steps", "1")
    assert 0 < max(seen) < 301 // 2


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--device", "tpu"), ExitCode.CONFIG, ["--device tpu", "--device auto, or --device cuda"]),
        (("--link-speed", "0"), ExitCode.CONFIG, ["--link-speed 0 is no speed", "above 0"]),
        (("--link-speed", "nan"), ExitCode.CONFIG, ["--link-speed nan"]),
        (("--steps", "0"), ExitCode.CONFIG, ["--steps 0"]),
        (("--device", "fake", "--trace", "a.json.gz"), ExitCode.CONFIG, ["--trace needs a device"]),
        (("--device", "cpu", "--trace", "a.json"), ExitCode.CONFIG, ["write --trace a.json.gz"]),
        (("--device", "cpu", "--trace", "no/a.json.gz"), ExitCode.CONFIG, ["no directory no"]),
        (
            ("--device", "cpu", "--cluster", "64x8xH100", "model.name=llama-3.1-405b",
             "model.overrides={}", "data.seq_len=2048", "train.micro_batch=1"),
            ExitCode.DOES_NOT_FIT,
            ["rank 0 of 512 does not fit into this machine's memory", "--device fake"],
        ),
    ],
)  # fmt: skip
def test_refusals(
    tunnel: Tunnel, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: ExitCode,
    says: list[str],
) -> None:  # fmt: skip
    small = replace(probe_cpu(), memory_bytes=2**30)
    monkeypatch.setattr("shardwise.tunnel.tunnel_run.probe_cpu", lambda: small)
    with pytest.raises(UserError) as caught:
        tunnel(*words)
    assert caught.value.code == code
    for text in says:
        assert text in str(caught.value)


def test_without_a_gpu_cuda_is_refused(tunnel: Tunnel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="torch sees no GPU") as caught:
        tunnel("--device", "cuda")
    assert caught.value.code == ExitCode.ENVIRONMENT
    assert "fake tensors" in caught.value.fix


def test_what_is_printed(config: Path, tmp_path: Path) -> None:
    words = ("tunnel", str(config), "--cluster", "4xH100", "--device", "fake", "--link-speed", "2")
    done = run_forked(tmp_path, *words)
    for text in (
        "wind tunnel: rank 0 of 4 on fake tensors",
        "memory of rank 0",
        "collectives of one step; links at 2 x their speed: NVLink of H100 738 GB/s",
        "reduce_scatter  shard  4      4",
        "along  a step",
        "note: torch.compile is off",
        f"next: shardwise tunnel {config} --cluster 4xH100 --link-speed 1",
    ):
        assert text in done.stdout
    shown = done.stdout[: done.stdout.index("next: ")]  # commands to type stay whole
    assert max(map(len, shown.splitlines())) <= 80
    # Progress, and no word of torch.
    stages = [re.sub(r"^ *\d+\.\d s  ", "", line) for line in done.stderr.splitlines()]
    assert stages[0] == "starting torch"
    assert stages[1].endswith("as rank 0 of 4")
    assert stages[2:4] == [
        "giving it storage, an optimizer and data",
        "a first update, which makes the optimizer's state",
    ]
    assert stages[-1] == "one step: update"
    passes = [stage.removeprefix("one step: ") for stage in stages[4:-1]]
    for number, (forward, backward) in enumerate(zip(passes[::2], passes[1::2], strict=True), 1):
        assert forward == f"forward of pass {number} of {len(passes) // 2}"
        assert backward == f"backward of pass {number} of {len(passes) // 2}"


def test_shards_may_end_anywhere(tunnel: Tunnel) -> None:
    """18 channels over 8 ranks in bf16 are 6 bytes each, which are no whole 8-byte words."""
    sizes = {"hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 3}
    odd = [f"model.overrides.{name}={size}" for name, size in sizes.items()]
    narrow = ("--device", "cpu", "--cluster", "8xCPU", "--steps", "1", "precision.param=bf16")
    assert tunnel(*narrow, *odd, "--link-speed", "inf")["step_s"] > 0
