"""The parts of `benchmarks/gpu.py` that need no GPU: the limit, the choice, the table, the race."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpu
from ceilings import Ceilings, best_block_s, limit_s, ways_of
from peers.contenders import Job, Measured, Ours, Peer, contenders_on
from peers.process import run_job, what_failed
from peers.shapes import GPU_SHAPES, SHAPES, Setting
from peers.table import best_rows, markdown, rows_of
from shardwise.config.load import load_config
from shardwise.facts.gpus import find_gpu
from shardwise.launch.prepare import choose_plan
from shardwise.units import GIB

EIGHT = GPU_SHAPES["8b-4096"]


def a_run(**changes: Any) -> dict[str, Any]:
    names = {"shape": "8b-4096", "precision": "bf16", "contender": "ours", "setting": "4-none"}
    figures = {"tokens_per_s": 10_000.0, "mfu": 0.5, "limit_tokens_per_s": 12_500.0}
    memory = {"allocated_gib": 80.0, "reserved_gib": 90.0}
    return {**names, "problem": "", **figures, **memory, **changes}


def test_the_limit_adds_compute_and_update() -> None:
    found = Ceilings(
        tokens=16384,
        block_s={"bf16": 0.030, "float8": 0.015},
        attention_s=0.004,
        head_s=0.080,
        copy_bytes_per_s=4e12,
    )
    update_s = 32 * 8_030_261_248 / 8 / 4e12
    bf16 = limit_s(found, EIGHT.spec, tokens=16384, world=8, precision="bf16")
    assert bf16 == pytest.approx(32 * 0.034 + 0.080 + update_s)
    float8 = limit_s(found, EIGHT.spec, tokens=32768, world=8, precision="float8")
    assert float8 == pytest.approx(2 * (32 * 0.019 + 0.080) + update_s)
    only_bf16 = Ceilings(
        tokens=1, block_s={"bf16": 1.0}, attention_s=1.0, head_s=1.0, copy_bytes_per_s=1.0
    )
    assert limit_s(only_bf16, EIGHT.spec, tokens=1, world=8, precision="float8") is None


def test_every_way_through_a_block_has_all_of_its_weights() -> None:
    spec = EIGHT.spec
    for part in ways_of(spec):
        assert len({sum(wide_in * wide_out for wide_in, wide_out in way) for way in part}) == 1
    weights = sum(wide_in * wide_out for part in ways_of(spec) for wide_in, wide_out in part[0])
    assert spec.num_layers * weights == spec.block_matmul_params_per_token


def test_a_block_takes_the_fastest_way_of_each_part() -> None:
    ways = [[((1, 3),), ((1, 1), (1, 1), (1, 1))], [((3, 1),)]]
    assert best_block_s(ways, {(1, 3): 5.0, (1, 1): 2.0, (3, 1): 1.0}) == 6.0
    assert best_block_s(ways, {(1, 3): 5.0, (1, 1): 1.0, (3, 1): 1.0}) == 4.0


def test_rounds_are_put_together() -> None:
    rounds = [a_run(tokens_per_s=speed) for speed in (10_000.0, 11_000.0)]
    (row,) = rows_of([*rounds, a_run(problem="skipped: the time was up")])
    assert row.tokens_per_s == 10_500
    assert row.spread == pytest.approx(0.1)
    assert row.mfu == pytest.approx(0.5 * 10_500 / 11_000)
    assert row.limit_share == pytest.approx(10_500 / 12_500)
    assert row.problem == "skipped: the time was up"


def test_the_best_setting_is_chosen_within_precision_and_cap() -> None:
    rows = rows_of(
        [
            a_run(setting="4-none", tokens_per_s=11_000.0, reserved_gib=90.0),
            a_run(setting="2-none", tokens_per_s=10_000.0, reserved_gib=59.0),
            a_run(setting="3-none", tokens_per_s=10_500.0, reserved_gib=61.0),
            a_run(setting="4-none-float8", precision="float8", tokens_per_s=15_000.0),
            a_run(contender="torchtitan", tokens_per_s=10_800.0, reserved_gib=94.0),
            {**a_run(contender="trainer", problem="out of memory"), "tokens_per_s": None},
        ]
    )
    found = {(row.precision, row.contender): row.setting for row in best_rows(rows)}
    assert found == {
        ("bf16", "ours"): "4-none",
        ("bf16", "torchtitan"): "4-none",
        ("float8", "ours"): "4-none-float8",
    }
    assert [row.setting for row in best_rows(rows, cap_gib=60)] == ["2-none"]


def test_the_table_is_made_from_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        a_run(),
        a_run(contender="torchtitan", tokens_per_s=8_000.0, reserved_gib=59.0),
        {"shape": "8b-4096", "precision": "float8", "contender": "torchtitan",
         "setting": "4-none-float8", "problem": "torchao is not installed"},
    ]  # fmt: skip
    machine = {"gpu": "H200", "torch": "2.11.0", "liger-kernel": None}
    data = {"machine": machine, "steps": 10, "cap_gib": 60.0, "ceilings": {}, "runs": runs}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(data))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--table", str(file)])
    gpu.main()
    text = capsys.readouterr().out
    assert text == markdown(data) + "\n"
    assert text.startswith("gpu H200, torch 2.11.0; medians of 10 steps")
    best, capped, everything = text.split("\n\n")[2::2]
    where = "8b-4096 | one GPU as rank 0 of 8, links take no time"
    ours = f"| {where} | bf16 | ours | 4-none | 10,000 | 50.0% | 80.0% | 80.0 | 90.0 | 1.000 |"
    theirs = f"| {where} | bf16 | torchtitan | 4-none | 8,000 | 50.0% | 64.0% | 80.0 | 59.0 |"
    assert ours in best
    assert f"{theirs} 1.250 |" in best
    assert ours not in capped
    assert f"{theirs} - |" in capped
    assert f"{theirs} - |  |" in everything, "one round is apart from none"
    assert "| 4-none-float8 | - | - | - | - | - | - | torchao is not installed |" in everything
    widths = {line.count("|") for line in everything.splitlines() if line}
    assert len(widths) == 1


@pytest.mark.parametrize("text", ["4", "4-some", "4-1.5", "4-none-fp4", "many-none", "us:4-none"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        gpu.one_setting(text)


def test_contenders_take_turns() -> None:
    given = argparse.Namespace(contenders=("ours", "torchtitan", "trainer"), settings=None)
    runs = [f"{run.contender} {run.setting}" for run in gpu.runs_of("1b", given)]
    assert runs == ["ours 8-none", "torchtitan 8-none", "ours 16-none", "torchtitan 4-none"]
    given.settings = [gpu.one_setting(text) for text in ("4-0.5", "torchtitan:2-none-float8")]
    runs = [f"{run.contender} {run.setting}" for run in gpu.runs_of("1b", given)]
    assert runs == ["ours 4-0.5", "torchtitan 4-0.5", "torchtitan 2-none-float8"]


@pytest.mark.parametrize("name", [name for name, shape in GPU_SHAPES.items() if shape.world > 1])
def test_ours_is_a_config_that_plans_the_shape(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    for text in shape.settings["ours"]:
        setting = Setting.parse(text)
        command = Ours("cuda", "H200", tmp_path).job(name, shape, setting, 10).command
        file, *words = command[command.index("tunnel") + 1 :]
        assert words[words.index("--cluster") + 1] == "8xH200"
        overrides = [word for word in words if "." in word and "=" in word]
        plan = choose_plan(load_config(file, [*overrides, "cluster.name=8xH200"]), {})
        assert plan.model.total_params == shape.spec.total_params
        assert plan.tokens_per_step == 8 * shape.tokens(setting)
        assert plan.decided.checkpoint_activations == setting.recompute
        assert plan.decided.strategy == ("shard_grad_op" if "keep" in text else "full_shard")


def test_one_gpu_is_trained_on(tmp_path: Path) -> None:
    shape, setting = SHAPES["one-gpu"], Setting.parse("2-none")
    job = Ours("cuda", "H200", tmp_path).job("one-gpu", shape, setting, 12)
    words = job.command[job.command.index("train") + 1 :]
    config = load_config(words[0], words[1:])
    assert (config.train.steps, config.train.micro_batch, config.observe.log_every) == (25, 2, 5)
    assert config.model.overrides == {"num_hidden_layers": 16}
    events = [
        {"event": "step", "step_s": step_s, "memory": {"allocated": 7, "reserved": 9}}
        for step_s in (30.0, 2.0, 0.4, 0.5, 0.6)
    ]
    run = tmp_path / config.name
    run.mkdir()
    lines = [json.dumps(event) for event in [{"event": "start"}, *events]]
    (run / "events.jsonl").write_text("\n".join(lines))
    assert job.read("") == Measured(0.5, 7, 9)


def test_what_is_missing_is_said() -> None:
    peer = Peer("peers.none", "cpu", ("json",), {"float8": "no_such_package"})
    assert peer.why_not(Setting.parse("4-none")) is None
    said = peer.why_not(Setting.parse("4-none-float8"))
    assert said == "no_such_package is not installed"


def test_activations_in_host_memory_are_ours_alone(tmp_path: Path) -> None:
    setting = Setting.parse("5-selective-host0.45")
    assert str(setting) == "5-selective-host0.45" and setting.in_host == 0.45
    command = Ours("cuda", "H200", tmp_path).job("8b-4096", EIGHT, setting, 10).command
    assert "memory.offload_activations=0.45" in command
    for name in ("torchtitan", "trainer"):
        peer = contenders_on("cpu", "H200", tmp_path, ())[name]
        assert "ours alone" in (peer.why_not(setting) or "")
    with pytest.raises(ValueError, match="'host2' is none of"):
        Setting.parse("5-selective-host2")


def test_a_process_is_read_or_its_failure_named(tmp_path: Path) -> None:
    def outcome(code: str, timeout_s: float = 60) -> Any:
        read = contenders_on("cpu", "CPU", tmp_path, ())["trainer"]
        job = read.job("tiny-one", SHAPES["tiny-one"], Setting.parse("2-none"), 1)
        return run_job(Job([sys.executable, "-c", code], job.read), tmp_path / "log", timeout_s)

    good = outcome(f"print('noise'); print({json.dumps(json.dumps(ANSWER))})")
    assert good.measured == Measured(**ANSWER)
    assert good.problem == ""
    assert outcome("raise ImportError('no such thing')").problem == "ImportError: no such thing"
    assert "cannot be read" in outcome("print('nothing')").problem
    assert outcome("import time; time.sleep(60)", timeout_s=0.2).problem == "the time was up"
    assert what_failed("torch.OutOfMemoryError: CUDA out of memory\nnote: bye", 1) == (
        "out of memory"
    )
    assert what_failed("", -9) == "exit code -9"


ANSWER = {"step_s": 2.0, "allocated_bytes": GIB, "reserved_bytes": 2 * GIB}


@dataclass
class Racer:
    """Answers at once, or fails."""

    code: str
    missing: str | None = None

    def why_not(self, setting: Setting) -> str | None:
        return self.missing

    def job(self, name: str, shape: Any, setting: Setting, steps: int) -> Job:
        return Job([sys.executable, "-c", self.code], lambda _: Measured(**ANSWER))


def test_a_race_goes_back_and_forth_and_writes_all_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Setting.parse("2-none")
    planned = [gpu.Run("tiny", name, setting) for name in ("ours", "torchtitan", "trainer")]
    racers = {"ours": Racer(""), "torchtitan": Racer("1/0"), "trainer": Racer("", "not here")}
    ceilings = {"tokens": 128, "block_s": {"bf16": 0.1}, "attention_s": 0.1, "head_s": 0.1}
    ceilings["copy_bytes_per_s"] = 1e12
    results = {"ceilings": {"tiny": ceilings}, "runs": []}
    book = gpu.Book(results, find_gpu("H200"), tmp_path / "results.json")
    given = argparse.Namespace(rounds=2, steps=1, logs=tmp_path)
    gpu.race([*planned, gpu.Run("tiny", "ours", Setting.parse("4-none"))], racers, given, book,
             ends=time.monotonic() + 600)  # fmt: skip
    gpu.race(planned[:1], racers, given, book, ends=0.0)

    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    told = [(run["round"], run["contender"], run["setting"], run["problem"]) for run in runs]
    assert told == [
        (1, "ours", "2-none", ""),
        (1, "torchtitan", "2-none", "ZeroDivisionError: division by zero"),
        (1, "trainer", "2-none", "not here"),
        (1, "ours", "4-none", ""),
        (2, "ours", "4-none", ""),
        (2, "ours", "2-none", ""),
        (1, "ours", "2-none", "skipped: the time was up"),
    ]
    first = runs[0]
    assert first["tokens_per_s"] == 2 * 64 / 2.0
    assert first["reserved_gib"] == 2
    # Two blocks of 0.2 s and a head of 0.1 s for 128 tokens, but for a little updating.
    assert first["limit_tokens_per_s"] == pytest.approx(128 / 0.5, rel=1e-3)
    assert 0 < first["mfu"] < 1
    assert "torchtitan 2-none" in capsys.readouterr().out
