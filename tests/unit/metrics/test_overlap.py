"""A hand-made trace of a GPU, in Kineto's form, whose right answer is known beforehand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hostile import put_pipe, within
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.errors import UserError
from shardwise.metrics import trace_file
from shardwise.metrics.overlap import Profile, Row, fold, profile_of
from shardwise.metrics.trace import parse_trace
from shardwise.metrics.trace_file import read_trace

MAIN, AUTOGRAD = 100, 101
LAYER, HEAD = "model.layers.0", "[norm, lm_head]"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Host:
    """Writes what a host and its GPU did, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.launched = 0

    def event(self, cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> None:
        row = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
        self.events.append({**row, "args": args})

    def label(self, name: str, ts: float, dur: float, tid: int = MAIN) -> None:
        self.event("user_annotation", name, tid, ts, dur)

    def op(self, name: str, ts: float, dur: float, number: int, *, forward: int = 0) -> None:
        tid = AUTOGRAD if forward else MAIN
        args = {"Sequence number": number, "Fwd thread id": forward}
        self.event("cpu_op", name, tid, ts, dur, **args)

    def launch(
        self, name: str, ts: float, at: float, dur: float, *, tid: int = MAIN, cat: str = "kernel"
    ) -> None:
        """A call at `ts` that runs on the device from `at` on."""
        self.launched += 1
        driver = name.startswith("triton")
        runtime = "cuda_driver" if driver else "cuda_runtime"
        self.event(runtime, "cuLaunchKernel", tid, ts, 1, correlation=self.launched)
        self.event(cat, name, 7, at, dur, correlation=self.launched, device=0, stream=7)


def hand_made(host_s: float = 1000) -> dict[str, Any]:
    """Two steps of 1 ms, the second holds only compute; the host is done with the first earlier.

    First step, device:  0-100 gather of the layer, alone; 100-300 its matmul; 250-400 gather of the
    head, of which 250-300 is hidden; 400-500 the head; 500-520 a copy to the host; 520-600 nothing;
    600-800 the layer's backward, of which 650-700 hides a reduce-scatter that goes on to 850, while
    the all-reduce of 840-860 follows; 860-980 nothing, 980-1000 Adam.
    """
    host = Host()
    host.label("step 7", 0, host_s)
    host.event("gpu_user_annotation", "step 7", 7, 0, 1000)
    host.label(f"unit {LAYER}", 1, 40)
    host.label(f"FSDP::all_gather ({LAYER})", 2, 8)
    host.launch(GATHER, 3, 0, 100)
    host.op("aten::mm", 20, 10, 50)
    host.launch("gemm", 21, 100, 200)
    host.label("FSDP::all_gather (model.norm, lm_head)", 32, 8)
    host.launch(GATHER, 33, 250, 150)
    host.label(f"unit {HEAD}", 45, 20)
    host.op("aten::mm", 46, 10, 51)
    host.launch("gemm", 47, 400, 100)
    host.launch("Memcpy DtoH", 60, 500, 20, cat="gpu_memcpy")
    host.op("autograd::engine::evaluate_function: MmBackward0", 100, 100, 50, forward=1)
    # Recomputed in backward: its own numbers, counted on this thread, mean nothing.
    host.event(
        "cpu_op", "aten::mm", AUTOGRAD, 101, 10, **{"Sequence number": 51, "Fwd thread id": 0}
    )
    host.launch("triton_gemm", 102, 600, 200, tid=AUTOGRAD)
    host.op("autograd::engine::evaluate_function: MmBackward0", 205, 10, 51, forward=1)
    host.launch("gemm_backward", 206, 700, 20, tid=AUTOGRAD)
    host.label(f"FSDP::post_backward_reduce ({LAYER})", 220, 30, AUTOGRAD)
    host.launch(SCATTER, 221, 650, 200, tid=AUTOGRAD)
    host.launch(REDUCE, 230, 840, 20, tid=AUTOGRAD)
    host.label("Optimizer.step#AdamW.step", 300, 20)
    host.launch("adam", 301, 980, 20)
    host.label("step 8", host_s, 500)
    host.launch("gemm", host_s + 1, 1000, 1000)
    units = {LAYER: [LAYER], HEAD: ["model.norm", "lm_head"]}
    about = {"rank": 3, "world_size": 8, "device": "cuda", "units": units}
    return {"schemaVersion": 1, "shardwise": about, "traceEvents": host.events}


@pytest.fixture(scope="module", params=[1000, 330], ids=["in-step", "host-ahead"])
def found(request: pytest.FixtureRequest) -> Profile:
    return profile_of(parse_trace(hand_made(request.param)))


def test_the_parts_of_a_step_add_up_to_it(found: Profile) -> None:
    first, second = found.steps
    assert (first.step, second.step) == (7, 8)
    assert first.seconds == pytest.approx(1e-3)
    assert first.compute_s == pytest.approx(520e-6)
    assert first.exposed_s == pytest.approx((100 + 100 + 60) * 1e-6)
    assert first.copies_s == pytest.approx(20e-6)
    assert first.idle_s == pytest.approx(200e-6)
    assert first.communication_s == pytest.approx((100 + 150 + 210) * 1e-6)
    # The last step lasts until the device is done, not until its last launch.
    assert second.seconds == pytest.approx(1e-3) and second.compute_s == pytest.approx(1e-3)
    assert found.share("exposed_s") == pytest.approx(0.13)


def test_each_collective_is_told_by_kind_and_unit(found: Profile) -> None:
    rows = {(row.name, row.unit): row for row in found.collectives}
    assert rows.keys() == {
        ("all_gather", LAYER), ("all_gather", HEAD), ("reduce_scatter", LAYER),
        ("all_reduce", LAYER),
    }  # fmt: skip
    # Of two steps, so a half of what the first one did.
    assert rows["all_gather", LAYER].exposed_s == pytest.approx(50e-6)
    assert rows["all_gather", HEAD].seconds == pytest.approx(75e-6)
    assert rows["all_gather", HEAD].exposed_s == pytest.approx(50e-6)
    assert rows["reduce_scatter", LAYER].exposed_s == pytest.approx(25e-6)
    assert rows["all_reduce", LAYER].exposed_s == pytest.approx(10e-6)


def test_the_copies_and_the_wait_of_a_played_collective_are_one() -> None:
    host = Host()
    host.label("step 1", 0, 300)
    host.label(f"FSDP::all_gather ({LAYER})", 1, 30)
    for start in (2, 12):
        host.label("collective all_gather", start, 8)
        host.launch("copy", start + 1, 10 * start, 10)
        host.launch("spin_kernel", start + 2, 10 * start + 10, 50)
    host.launch("gemm", 40, 40, 20)
    about = {"rank": 0, "world_size": 8, "device": "cuda", "units": {LAYER: [LAYER]}}
    found = profile_of(parse_trace({"shardwise": about, "traceEvents": host.events}))
    [gathers] = found.collectives
    assert (gathers.name, gathers.unit, gathers.calls) == ("all_gather", LAYER, 2)
    assert gathers.seconds == pytest.approx(120e-6)
    assert gathers.exposed_s == pytest.approx(100e-6)
    assert [row.name for row in found.kernels] == ["gemm"]


def test_collectives_are_told_by_axis_beside_the_plan() -> None:
    host = Host()
    host.label("step 1", 0, 300)
    host.label("along tensor 64", 1, 8)
    host.launch(GATHER, 2, 10, 30)
    host.label("along shard 1000", 10, 8, AUTOGRAD)
    host.launch(SCATTER, 11, 60, 40, tid=AUTOGRAD)
    host.launch("gemm", 20, 20, 50)
    host.launch(REDUCE, 30, 110, 5)  # of no axis
    planned = {"shard": {"num_bytes": 990.0, "seconds": 3e-5}}
    about = {"rank": 0, "world_size": 8, "device": "cuda", "units": {}, "planned": planned}
    found = profile_of(parse_trace({"shardwise": about, "traceEvents": host.events}))
    shard, tensor = found.axes
    assert (shard.axis, shard.calls, shard.num_bytes) == ("shard", 1, 1000)
    assert (shard.planned_bytes, shard.planned_s) == (990.0, 3e-5)
    assert shard.seconds == pytest.approx(40e-6) and shard.exposed_s == pytest.approx(30e-6)
    assert (tensor.axis, tensor.num_bytes, tensor.planned_bytes) == ("tensor", 64, 0.0)
    assert tensor.seconds == pytest.approx(30e-6) and tensor.exposed_s == pytest.approx(10e-6)


def test_kernels_belong_to_the_unit_that_launched_them(found: Profile) -> None:
    rows = {(row.name, row.unit): row.seconds for row in found.kernels}
    assert rows["gemm", LAYER] == pytest.approx(100e-6)
    assert rows["gemm", HEAD] == pytest.approx(50e-6)
    # In backward by the number of the operator that its forward ran, on another thread.
    assert rows["triton_gemm", LAYER] == pytest.approx(100e-6)
    assert rows["gemm_backward", HEAD] == pytest.approx(10e-6)
    assert rows["adam", "optimizer"] == pytest.approx(10e-6)
    assert rows["gemm", "-"] == pytest.approx(500e-6)


def test_gaps_name_what_came_after(found: Profile) -> None:
    seen = [(round(1e6 * gap.seconds), gap.step, gap.before, gap.unit) for gap in found.gaps]
    assert seen == [(120, 7, "adam", "optimizer"), (80, 7, "triton_gemm", LAYER)]


def test_the_event_holds_shares_that_add_up(found: Profile) -> None:
    event = found.summary()
    shares = [event[f"{part}_share"] for part in ("compute", "exposed", "copies", "idle")]
    assert sum(shares) == pytest.approx(1.0)
    assert (event["step"], event["steps"], event["rank"]) == (8, 2, 3)
    assert {row["name"] for row in event["rows"]} == {
        "all_gather", "reduce_scatter", "all_reduce",
    }  # fmt: skip
    json.dumps(event)


def test_rows_fold_to_the_most_time_first() -> None:
    rows = [Row("a", "x", 1, 2.0, 1.0), Row("b", "x", 1, 5.0, 0.0), Row("a", "y", 2, 4.0, 1.0)]
    assert fold(rows, by=lambda row: row.name) == [
        Row("a", "-", 3, 6.0, 2.0), Row("b", "x", 1, 5.0, 0.0),
    ]  # fmt: skip


def write(path: Path, data: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump(data, file)
    return path


def test_the_command_takes_the_newest_trace_of_the_lowest_rank(tmp_path: Path) -> None:
    for name in ("step-7-rank-0", "step-10-rank-1", "step-10-rank-0"):
        write(tmp_path / "profile" / f"{name}.json.gz", hand_made())
    done = CliRunner().invoke(app, ["profile", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "step-10-rank-0.json.gz: steps 7 to 8, rank 3 of 8, cuda" in done.output
    assert "communication: 230.0 us per step, of which 130.0 us (57%) exposed" in done.output
    assert "gaps of 10.0 us or more with nothing to do: 1 per step, 100.0 us (10.0%)" in done.output
    kernels = done.output.partition("kernels that took longest")[2]
    assert "model.layers.*" in kernels


@pytest.mark.parametrize(
    "data", [[], {}, {"shardwise": {}}, {"traceEvents": [], "shardwise": hand_made()["shardwise"]}]
)
def test_what_is_no_trace_is_refused(tmp_path: Path, data: object) -> None:
    with pytest.raises(UserError, match="is no trace of a shardwise run"):
        read_trace(write(tmp_path / "x.json.gz", data))


def test_a_run_without_a_profile_says_how_to_get_one(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["profile", str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert "observe.profile" in done.exception.fix
    half = tmp_path / "half.json.gz"
    half.write_bytes(write(tmp_path / "x.json.gz", hand_made()).read_bytes()[:200])
    with pytest.raises(UserError, match="is no trace"):
        read_trace(half)
    with pytest.raises(UserError, match="there is no trace"):
        read_trace(tmp_path / "none.json.gz")


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(b"[" * 100_000),
        gzip.compress(b'{"a": ' + b"9" * 5000 + b"}"),
        gzip.compress(b" " * 20_000),
        gzip.compress(json.dumps({"shardwise": 3}).encode())[:20] + b"x" * 30,
    ],
    # Compressed data has the time in it, and names of tests must be the same in every process.
    ids=["deep", "large number", "blanks", "broken"],
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "_MAX_BYTES", 10_000)
    file = tmp_path / "x.json.gz"
    file.write_bytes(data)
    with pytest.raises(UserError, match="is no trace of a shardwise run"):
        read_trace(file)
    with within(5), pytest.raises(UserError, match="is no trace of a shardwise run") as caught:
        read_trace(put_pipe(file))
    assert "it is a pipe" in caught.value.why
