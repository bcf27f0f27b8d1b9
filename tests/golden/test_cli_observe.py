"""One real run of two ranks that feeds every sink, under a real Prometheus and bad clients."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/metrics/sinks"))
from bad_clients import bombard, get

from commands import Command
from real_prometheus import HAS_PROMETHEUS, WHY_SKIPPED, Prometheus, free_port
from shardwise.metrics.events import read_events
from shardwise.metrics.sinks.scalars import scalars_of

pytestmark = pytest.mark.dist
# Two ranks train meanwhile, as fast as they can.
NUM_BAD = 10_000 if "SHARDWISE_CHAOS" in os.environ else 1_000
HAS_WANDB = importlib.util.find_spec("wandb") is not None
Event = dict[str, Any]

CONFIG = """\
model: tiny-llama
data: {source: synthetic, seq_len: 32}
cluster: 2xCPU
shard: {strategy: full_shard}
train: {steps: 100000, global_batch: 4}
checkpoint: {every: 50, keep: 2}
observe: {log_every: 1}
"""


@dataclass(frozen=True)
class Watched:
    """A run that was watched while it ran, and what was seen."""

    run_dir: Path
    exitcode: int
    page: str
    steps_before: int
    steps_after: int
    bombarded_s: float
    scraped: dict[str, float] | None
    """From a real Prometheus server; None where there is none."""


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def steps_of(run_dir: Path) -> list[Event]:
    file = run_dir / "events.jsonl"
    events = read_events(file) if file.exists() else []
    return [event for event in events if event["event"] == "step"]


def look_at(server: Prometheus) -> dict[str, float]:
    """Every series of the run, by name."""
    wait_until(lambda: bool(server.query('training_step{job_name="watched"} > 5')))
    wait_until(lambda: bool(server.query("fsdp:allgather_seconds_bucket")))
    assert server.query('up{job="shardwise"}')[0]["value"][1] == "1"
    found = server.query('{job="shardwise", job_name="watched"}')
    found += server.query('{__name__=~"fsdp:.*"}')
    return {one["metric"]["__name__"]: float(one["value"][1]) for one in found}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("observe")
    (folder / "run.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def watched(home: Path) -> Iterator[Watched]:
    run_dir, port = home / "watched", free_port()
    words = ["train", str(home / "run.yaml"), f"runs_dir={home}", "name=watched"]
    words += ["observe.tensorboard=true", f"observe.prometheus_port={port}"]
    words += ["observe.profile=3", "observe.profile_steps=2"]
    # The runs that it is compared with copy what they gather.
    words += ["shard.gather_in_place=true"]
    words += ["observe.wandb=offline"] if HAS_WANDB else []
    run = Command(words, home / "output")
    server = (
        Prometheus(home / "prometheus", port, every=1.0, scale=1 / 15) if HAS_PROMETHEUS else None
    )
    try:
        wait_until(lambda: len(steps_of(run_dir)) > 5)
        scraped = look_at(server) if server is not None else None
        before, started = len(steps_of(run_dir)), time.monotonic()
        bombard(("127.0.0.1", port), NUM_BAD)
        bombarded_s = time.monotonic() - started
        after = len(steps_of(run_dir))
        status, page = get(("127.0.0.1", port))
        assert status == 200
        run.send_signal(signal.SIGTERM)
        exitcode = run.wait(60)
    finally:
        run.kill()
        if server is not None:
            server.close()
    yield Watched(run_dir, exitcode, page.decode(), before, after, bombarded_s, scraped)


def curves(run_dir: Path) -> list[tuple[int, str, float]]:
    """What every sink must hold: (step, name, value), in the order of the record."""
    events = read_events(run_dir / "events.jsonl")
    return [(e["step"], name, value) for e in events for name, value in scalars_of(e).items()]


def test_prometheus_scrapes_the_run(watched: Watched) -> None:
    if watched.scraped is None:
        pytest.skip(WHY_SKIPPED)
    assert watched.scraped["training_step"] > 5
    assert watched.scraped["fsdp_step_duration_seconds"] > 0
    assert watched.scraped["fsdp:step_time_seconds"] > 0
    assert watched.scraped["fsdp:grad_norm"] > 0
    assert watched.scraped["fsdp_allgather_seconds_count"] > 0
    assert watched.scraped["fsdp_reducescatter_seconds_count"] > 0
    by_step = {event["step"]: event for event in steps_of(watched.run_dir)}
    norms = {event["grad_norm"] for event in by_step.values()}
    assert watched.scraped["fsdp_grad_norm"] in norms


def test_bad_requests_leave_the_run_untouched(watched: Watched) -> None:
    times = [event["step_s"] for event in steps_of(watched.run_dir)]
    quiet = statistics.median(times[1 : watched.steps_before])
    besieged = statistics.median(times[watched.steps_before : watched.steps_after])
    print(
        f"{NUM_BAD} bad requests in {watched.bombarded_s:.1f} s; a step took "
        f"{1e3 * quiet:.1f} ms before and {1e3 * besieged:.1f} ms meanwhile"
    )
    assert watched.steps_after > watched.steps_before
    assert 'training_step{job_name="watched"}' in watched.page
    events = read_events(watched.run_dir / "events.jsonl")
    assert not [event for event in events if event["event"] in ("sink_failed", "restart")]
    assert events[-1]["event"] == "stopped"
    assert watched.exitcode == 75


def test_the_page_holds_what_the_record_holds(watched: Watched) -> None:
    line = next(x for x in watched.page.splitlines() if x.startswith("training_step{"))
    step = int(float(line.split()[-1]))
    event = next(event for event in steps_of(watched.run_dir) if event["step"] == step)
    assert f'training_loss{{job_name="watched"}} {event["loss"]!r}' in watched.page
    assert f'fsdp_grad_norm{{job_name="watched"}} {event["grad_norm"]!r}' in watched.page


def test_tensorboard_reads_the_same_numbers(watched: Watched) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(watched.run_dir / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    held = {
        (point.step, tag, make_ndarray(point.tensor_proto).item())
        for tag in found.Tags()["tensors"]
        for point in found.Tensors(tag)
    }
    assert held == set(curves(watched.run_dir))
    names = {tag for _, tag, _ in held}
    assert {"step/loss", "step/grad_norm", "step/memory/reserved"} <= names
    assert "collectives/rows/all_gather/forward/p99_s" in names


@pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed (pip install shardwise[wandb])")
def test_wandb_reads_the_same_numbers(watched: Watched) -> None:
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    file = next(watched.run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    store = DataStore()
    store.open_for_scan(str(file))
    held = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            held += [(row["step"], key, row[key]) for key in row if key[0] != "_" and key != "step"]
    assert sorted(held) == sorted(curves(watched.run_dir))


def test_profiled_steps_are_told_by_unit(
    watched: Watched, shardwise: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    folder, run = watched.run_dir / "profile", str(watched.run_dir)
    assert {file.name for file in folder.iterdir()} == {
        "step-3-rank-0.json.gz", "step-3-rank-1.json.gz",
    }  # fmt: skip
    shown = shardwise("profile", run).stdout
    assert "steps 3 to 4, rank 0 of 2, cpu" in shown
    found = json.loads(shardwise("profile", run, "--json").stdout)
    for step in found["steps"]:
        parts = [step[name] for name in ("compute_s", "exposed_s", "copies_s", "idle_s")]
        assert min(parts) >= 0 and sum(parts) == pytest.approx(step["seconds"])
    units = {f"model.layers.{n}" for n in range(4)} | {"model.embed_tokens", "[norm, lm_head]"}
    calls: dict[str, float] = {}
    for row in found["collectives"]:
        calls[row["name"]] = calls.get(row["name"], 0) + row["calls"]
        # Only sums over all ranks, of tokens, losses and norms, belong to no unit.
        assert row["unit"] in units or row["name"] == "all_reduce"
        # A rank waits in gloo's collectives: nothing can hide them.
        assert row["exposed_s"] == pytest.approx(row["seconds"], rel=0.2)
    assert {row["unit"] for row in found["collectives"]} - {"-"} == units
    # `aten::mm` is what a linear layer runs in backward, on the way to its own unit's gradients.
    assert {f"model.layers.{n}" for n in range(4)} <= {
        row["unit"] for row in found["kernels"] if row["name"] == "aten::mm"
    }
    events = read_events(watched.run_dir / "events.jsonl")
    timed = next(e for e in events if e["event"] == "collectives" and e["step"] == 3)
    counted = {name: 0 for name in calls}
    for row in timed["rows"]:
        counted[row["kind"]] += row["count"]
    assert all(calls[kind] == counted[kind] for kind in ("all_gather", "reduce_scatter"))
    (event,) = [event for event in events if event["event"] == "profile"]
    assert (event["step"], event["steps"]) == (4, 2)
    assert (watched.run_dir / event["trace"]).is_file()
    assert event["exposed_share"] == found["summary"]["exposed_share"] > 0


def test_sinks_and_profile_change_no_number(
    watched: Watched, home: Path, shardwise: Callable[..., object]
) -> None:
    shardwise(
        "train", str(home / "run.yaml"), f"runs_dir={home}", "name=alone", "train.stop_after=6"
    )
    alone, seen = steps_of(home / "alone"), steps_of(watched.run_dir)[:6]
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[e[key] for key in keys] for e in alone] == [[e[key] for key in keys] for e in seen]
    assert all(math.isfinite(event["loss"]) for event in alone)
