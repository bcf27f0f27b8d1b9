"""`shardwise fabric` through the real command: measured on two ranks, and read from files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commands import run_forked
from shardwise.cli.main import app
from shardwise.errors import UserError

SHARDWISE = Path(sys.executable).with_name("shardwise")
TABLE = """# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid  7 on gpu-a device  0 [0x07] NVIDIA H100
#  Rank  1 Group  0 Pid  8 on gpu-a device  1 [0x0b] NVIDIA H100
  1073741824  268435456  float  sum  -1  9000.0  119.3  119.3  0  9000.0  119.3  119.3  0
"""
LOG = "a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0\n"


@pytest.fixture(autouse=True)
def _outside_of_any_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run(*words: str) -> tuple[str, UserError | None]:
    """(what was printed, the error that ended it)."""
    result = CliRunner().invoke(app, ["fabric", *words])
    error = result.exception
    assert error is None or isinstance(error, UserError), result.output
    return result.stdout, error


@pytest.mark.dist
def test_two_ranks_are_measured(tmp_path: Path) -> None:
    words = ("--cluster", "2xCPU", "--sizes", "4KiB,256KiB", "--json")
    done = run_forked(tmp_path, "fabric", *words)
    assert "all_to_all of 2 ranks, inside: 4.0 KiB, 256.0 KiB" in done.stderr
    found = json.loads(done.stdout)
    assert (found["library"], found["passed"]) == ("gloo", True)
    seen = [(each["kind"], each["num_bytes"]) for each in found["collectives"]]
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    assert seen == [(kind, size) for kind in kinds for size in (4096, 262144)]
    assert all(each["wrong"] == [] and each["seconds"] > 0 for each in found["collectives"])
    for each in found["collectives"]:
        # Of two ranks an all-reduce moves all, the others half.
        factor = 1.0 if each["kind"] == "all_reduce" else 0.5
        rate = each["algorithm_bytes_per_s"]
        assert rate == pytest.approx(each["num_bytes"] / each["seconds"])
        assert each["bus_bytes_per_s"] == pytest.approx(factor * rate)
    flows = [each["flows"] for each in found["pairs"]]
    assert [[(f["sender"], f["receiver"], f["wrong"]) for f in each] for each in flows] == [
        [(0, 1, 0)],
        [(1, 0, 0)],
    ]
    verdicts = {gate["name"]: gate["verdict"] for gate in found["gates"]}
    assert verdicts == {"data": "pass", "inside a node": "skip", "pairs inside": "skip"}


def test_files_are_judged_by_the_same_gates(tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text(TABLE)
    (tmp_path / "nccl.log").write_text(LOG)
    files = ("--nccl-tests", "table.txt", "--nccl-log", "nccl.log")
    out, error = run("--cluster", "2x8xH100", *files)
    assert error is not None
    assert error.code == 4
    assert error.what == "the fabric of 2x8xH100 did not pass: inside a node, nccl network"
    assert "NVLink of H100 should be faster" in error.why
    assert "NCCL_IB_HCA" in error.why
    for words in ("119.30 GB/s", "368.", "all_reduce 32%", "1 of 1 channels over TCP sockets"):
        assert words in out
    words = ("--cluster", "2x8xH100", "cluster.interconnect=ethernet-100", "--min-share", "0.3")
    out, error = run(*words, *files, "--json")
    assert error is None
    assert json.loads(out)["passed"] is True


def test_the_cluster_of_a_run_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: tiny-llama\ncluster: {name: 2x8xH100, interconnect: ethernet-100}\n"
    )
    (tmp_path / "nccl.log").write_text(LOG)
    out, error = run("run.yaml", "--nccl-log", "nccl.log")
    assert error is None
    assert "between ethernet-100 (11.25 GB/s of data per node, one way)" in out


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        ((), "one rank has no other rank to communicate with", 4),
        (("--cluster", "2x2xCPU"), "-m shardwise fabric", 4),
        (("--cluster", "8xH100"), "cluster 8xH100 needs 8 GPUs", 4),
        (("--cluster", "2xCPU", "--sizes", "1MiB,lots"), "'lots' is no size", 2),
        (("--cluster", "2xCPU", "--sizes", "4B"), "4 bytes are too few for 2 ranks", 2),
        (("--collectives", "all_gather,gossip"), "gossip is not known", 2),
        (("--min-share", "80"), "--min-share 80 is not a share", 2),
        (("cluster.interconnect=string", "--cluster", "2xCPU"), "unknown network 'string'", 2),
        (("cluster.interconect=ethernet-1",), "unknown key `interconect`", 2),
        (("--nccl-log", "missing.log"), "missing.log cannot be read", 2),
    ],
)
def test_what_cannot_be_measured_is_said(words: tuple[str, ...], says: str, code: int) -> None:
    _, error = run(*words)
    assert error is not None
    assert error.code == code
    assert says in str(error)
    assert error.fix


def test_a_log_without_nccl_in_it_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("step 1 loss 2.0\n")
    _, error = run("--nccl-log", "train.log")
    assert error is not None
    assert "no NCCL channel is named" in error.what


def set_rank(monkeypatch: pytest.MonkeyPatch, rank: int, *, world: int, of_a_node: int) -> None:
    """What torchrun tells a rank."""
    counts = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": of_a_node, "LOCAL_RANK": rank % of_a_node}
    for name, value in {"RANK": rank, "MASTER_PORT": 29500, **counts}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def test_more_ranks_than_the_cluster_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_rank(monkeypatch, 0, world=4, of_a_node=2)
    _, error = run("--cluster", "2xCPU")
    assert error is not None
    assert "the launcher has started 4 ranks; 2xCPU has 2" in error.what


def test_a_link_that_is_dead_is_named_by_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Timed out waiting 300000ms for recv operation to complete\nframes")

    set_rank(monkeypatch, 1, world=2, of_a_node=1)
    monkeypatch.setattr("shardwise.launch.group.join_process_group", fail)
    _, error = run()
    assert error is not None
    assert error.code == 4
    assert error.what.startswith("rank 1 on ")
    assert error.why == "Timed out waiting 300000ms for recv operation to complete"
    assert "GLOO_SOCKET_IFNAME" in error.fix
