"""The real command with real ranks: run, stop, resume, refuse, fail."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import TIMEOUT_S, Command
from forked import rank_of

Run = Callable[..., subprocess.CompletedProcess[str]]
Losses = Callable[[Path], dict[int, float]]
pytestmark = pytest.mark.dist

CONFIG = """\
model: tiny-llama
data: {source: jsonl, path: RECORDS, seq_len: 64, eval_fraction: 0.1, eval_sequences: 6}
cluster: 2xCPU
shard: {strategy: full_shard}
optim: {lr: 3e-3}
train: {steps: 8, global_batch: 8}
observe: {log_every: 1}
"""


def write_records(file: Path, *, corrupt: int) -> None:
    records = [json.dumps({"text": f"{n} and {n} make {2 * n}. " * 8}) for n in range(200)]
    for index in range(corrupt):
        records[10 + index] = '{"text": "cut off'
    file.write_text("\n".join(records) + "\n")


def write_config(folder: Path) -> Path:
    write_records(folder / "records.jsonl", corrupt=1)
    file = folder / "run.yaml"
    file.write_text(CONFIG.replace("RECORDS", str(folder / "records.jsonl")))
    return file


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def config(home: Path) -> str:
    return str(write_config(home))


@pytest.fixture(scope="module")
def whole(home: Path, config: str, shardwise: Run) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run from the first step to the last."""
    done = shardwise("train", config, f"runs_dir={home}", "name=whole")
    return home / "whole", done


@pytest.fixture(scope="module")
def stopped(home: Path, config: str, shardwise: Run) -> Path:
    """A run that ended after step 4 of 8."""
    words = ("train", config, f"runs_dir={home}", "name=stopped", "train.stop_after=4")
    done = shardwise(*words, "gates.max_memory=0.0001")
    assert "stopped after step 4 of 8" in done.stdout
    # A gate that failed is said; it is no error unless that is asked for.
    assert "gate fail      memory:" in done.stdout and "a smaller train.micro_batch" in done.stdout
    return home / "stopped"


def copy_run(run_dir: Path, name: str) -> Path:
    return Path(shutil.copytree(run_dir, run_dir.with_name(name)))


def events_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_the_run_directory_is_complete(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = whole
    assert f"run directory: {run_dir}" in done.stdout
    for name in (
        "config.yaml",
        "plan.json",
        "events.jsonl",
        "checkpoints/step-00000008/manifest.json",
        "logs/attempt-1/rank-0.log",
        "logs/attempt-1/rank-1.log",
    ):
        assert (run_dir / name).is_file(), name
    assert not list(run_dir.glob("checkpoints/.writing*"))
    assert "finished 8 steps" in (run_dir / "logs/attempt-1/rank-0.log").read_text()
    assert events_of(run_dir, "end")[0]["finished"] is True


def test_a_run_begins_with_what_it_reads_and_what_it_computes_on(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = whole
    head = done.stdout.partition("\nstep ")[0]
    assert "\ntokenizer: byte (" in head and "\nfirst weights: random (" in head
    assert re.search(r"^device: 2 x .+ GiB each$", head, re.MULTILINE)
    (data,) = events_of(run_dir, "data")
    read = 8 * 8 / ((data["tokens"] - 1) // 64)
    tokens = f"{data['tokens'] / 1000:.1f}k tokens"
    assert f"\ndata: {data['documents']} documents, {tokens}, read {read:.3g} times in 8 s" in head
    # Of 200 records one is damaged, and a tenth is held out.
    assert 150 < data["documents"] < 199
    fit = [line for line in head.splitlines() if str(run_dir.parent) not in line]
    assert [line for line in fit if len(line) > 80] == []


def test_every_command_that_a_run_ends_with_works(
    whole: tuple[Path, subprocess.CompletedProcess[str]], shardwise: Run, tmp_path: Path
) -> None:
    lines = whole[1].stdout.partition("\nnext: ")[2].splitlines()
    assert len(lines) == 4
    for line in lines:
        program, verb, *words = shlex.split(line.split("   (")[0])
        assert program == "shardwise"
        # A plan is as far as this goes: the run that it is for takes twice as long as the first.
        verb = "plan" if verb == "train" else verb
        shardwise(verb, *words, cwd=tmp_path)


def test_the_doctor_finds_nothing_in_a_good_run_and_a_damaged_checkpoint_in_another(
    whole: tuple[Path, subprocess.CompletedProcess[str]], shardwise: Run
) -> None:
    done = shardwise("doctor", str(whole[0]), "--json")
    found = {each["id"] for each in json.loads(done.stdout)["findings"]}
    # One record of the data is broken on purpose. What other programs on the machine cost a run
    # (SW4..) is true on a busy machine.
    assert {each for each in found if not each.startswith("SW4")} == {"SW316"}
    broken = copy_run(whole[0], "broken")
    (broken / "checkpoints/step-00000008/manifest.json").write_text("{")
    (broken / "logs/attempt-1/rank-1.log").open("a").write("OSError: [Errno 5] Input/output error")
    done = shardwise("doctor", str(broken), expect=5)
    assert "error SW301: A checkpoint is damaged" in done.stdout
    assert "error SW664: A disk cannot be read or written" in done.stdout


@pytest.mark.long
def test_activations_can_wait_in_host_memory(
    home: Path, config: str, shardwise: Run, losses_of: Losses, whole: tuple[Path, Any]
) -> None:
    words = (f"runs_dir={home}", "name=waiting", "train.stop_after=2")
    done = shardwise("train", config, *words, "memory.offload_activations=0.5")
    waiting, usual = losses_of(home / "waiting"), losses_of(whole[0])
    assert [waiting[step] for step in (1, 2)] == [usual[step] for step in (1, 2)]
    assert "activations of 2 of 4 blocks are in host memory until backward" in done.stdout


@pytest.mark.long
def test_documents_can_be_kept_apart(
    home: Path, config: str, shardwise: Run, losses_of: Losses, whole: tuple[Path, Any]
) -> None:
    words = (f"runs_dir={home}", "name=apart", "train.steps=2", "checkpoint.at_end=false")
    flash = "model.attention=flash_attention_4"
    shardwise("train", config, *words, "data.document_mask=true", flash)
    apart, together = losses_of(home / "apart"), losses_of(whole[0])
    # Records of 128 to 200 letters: most sequences of 64 hold one document, some hold two.
    assert 0 < abs(apart[1] - together[1]) < 0.01 * together[1]


@pytest.mark.long
def test_adam_can_keep_its_state_in_half_the_bytes(
    home: Path, config: str, shardwise: Run, losses_of: Losses, whole: tuple[Path, Any]
) -> None:
    words = (f"runs_dir={home}", "name=narrow", "train.stop_after=2")
    shardwise("train", config, *words, "optim.state=bf16")
    narrow, wide = losses_of(home / "narrow"), losses_of(whole[0])
    assert narrow[1] == wide[1] and narrow[2] == pytest.approx(wide[2], rel=1e-2)

    def size(run_dir: Path, step: int) -> int:
        files = run_dir.glob(f"checkpoints/step-{step:08}/rank-*.bin")
        return sum(file.stat().st_size for file in files)

    # 4 bytes a parameter, and twice 4 or twice 2 of Adam's.
    assert 0 < size(home / "narrow", 2) == pytest.approx(size(whole[0], 8) * 8 / 12, rel=0.05)


def test_every_step_and_the_units_are_printed(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = whole
    assert "6 units" in done.stdout
    assert sum(line.startswith("step ") for line in done.stdout.splitlines()) == 8
    assert done.stdout.count("finished 8 steps") == 1


def test_losses_are_the_recorded_ones(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
    assert_golden: Callable[[str, Path], None],
) -> None:
    assert_golden("tiny-llama", whole[0])


def test_the_end_of_a_run_judges_its_gates(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = whole
    (judged,) = events_of(run_dir, "gates")
    verdicts = {gate["name"]: gate["verdict"] for gate in judged["gates"]}
    assert judged["step"] == 8
    assert verdicts["loss"] == verdicts["checkpoints"] == "pass" and verdicts["mfu"] == "skip"
    passed, skipped = (line for line in done.stdout.splitlines() if line.startswith("  gates  "))
    assert "passed: memory, loss" in passed and "not judged: mfu" in skipped
    ended = done.stdout[done.stdout.index("finished") : done.stdout.index("next: ")]
    assert max(map(len, ended.splitlines())) <= 80


def test_a_start_says_what_it_runs_with(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    (start,) = events_of(whole[0], "start")
    assert {"torch", "transformers", "shardwise", "python"} == set(start["versions"])
    assert start["environment"]["device"]


def test_the_held_out_loss_is_reported_and_falls(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = whole
    first, last = events_of(run_dir, "eval")
    assert (first["step"], last["step"]) == (0, 8)
    assert last["loss"] < first["loss"]
    assert f"eval at step 8: loss {last['loss']:.4f}" in done.stdout


def test_a_corrupt_record_is_named(
    whole: tuple[Path, subprocess.CompletedProcess[str]], home: Path
) -> None:
    run_dir, done = whole
    place = f"{home / 'records.jsonl'}:11"
    assert f"skipped record {place}: invalid JSON" in done.stdout
    assert events_of(run_dir, "data")[0]["skipped"][0].startswith(place)


def test_the_same_command_resumes_bit_for_bit(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
    stopped: Path,
    config: str,
    shardwise: Run,
    losses_of: Losses,
) -> None:
    run_dir = copy_run(stopped, "resumed")
    words = ("train", config, f"runs_dir={run_dir.parent}", "name=resumed")
    done = shardwise(*words)
    assert "resumed at step 4" in done.stdout
    assert losses_of(run_dir) == losses_of(whole[0])
    assert events_of(run_dir, "eval")[-1]["loss"] == events_of(whole[0], "eval")[-1]["loss"]
    assert (run_dir / "logs/attempt-2/rank-1.log").is_file()


def test_a_run_goes_on_with_other_ranks(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
    stopped: Path,
    config: str,
    shardwise: Run,
    losses_of: Losses,
) -> None:
    run_dir = copy_run(stopped, "narrower")
    words = ("train", config, f"runs_dir={run_dir.parent}", "name=narrower", "cluster.name=1xCPU")
    shardwise(*words)
    expected, found = losses_of(whole[0]), losses_of(run_dir)
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-5)


def test_a_finished_run_has_nothing_to_do(
    whole: tuple[Path, subprocess.CompletedProcess[str]], config: str, shardwise: Run
) -> None:
    run_dir = copy_run(whole[0], "again")
    words = (f"runs_dir={run_dir.parent}", "name=again", "cluster.name=1xCPU")
    words += ("gates.max_memory=0.0001", "gates.enforce=true")
    done = shardwise("train", config, *words, expect=5)
    assert "nothing to do: step 8 of 8 is done" in done.stdout
    assert len(events_of(run_dir, "step")) == 8
    assert len(events_of(run_dir, "gates")) == 1
    assert "did not pass: memory" in done.stderr


def test_starting_over_a_run_is_refused(stopped: Path, config: str, shardwise: Run) -> None:
    words = ("train", config, f"runs_dir={stopped.parent}", "name=stopped")
    done = shardwise(*words, "checkpoint.resume=false", expect=2)
    assert "holds checkpoints up to step 4" in done.stderr
    assert "nothing is overwritten" in done.stderr
    assert len(events_of(stopped, "step")) == 4


def test_another_model_in_the_same_directory_is_refused(
    stopped: Path, config: str, shardwise: Run
) -> None:
    words = ("train", config, f"runs_dir={stopped.parent}", "name=stopped")
    before = (stopped / "plan.json").read_text()
    for change in ("model.name=tiny-qwen", "model.overrides.num_hidden_layers=2"):
        done = shardwise(*words, change, expect=2)
        assert "holds checkpoints of another model" in done.stderr
        assert "another name" in done.stderr
    assert (stopped / "plan.json").read_text() == before


@pytest.mark.long
def test_torchrun_gives_the_same_losses(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
    config: str,
    shardwise: Run,
    losses_of: Losses,
) -> None:
    home = whole[0].parent
    done = shardwise(
        *("--standalone", "--nproc-per-node", "2", "-m", "shardwise", "train", config),
        *(f"runs_dir={home}", "name=torchrun"),
        module="torch.distributed.run",
    )
    assert losses_of(home / "torchrun") == losses_of(whole[0])
    assert done.stdout.count("run directory:") == 1
    assert (home / "torchrun/plan.json").is_file()


def test_too_many_corrupt_records_end_the_run(tmp_path: Path, config: str, shardwise: Run) -> None:
    write_records(tmp_path / "bad.jsonl", corrupt=3)
    words = (f"runs_dir={tmp_path}", f"data.path={tmp_path / 'bad.jsonl'}", "data.max_corrupt=2")
    done = shardwise("train", config, *words, "cluster.name=1xCPU", expect=2)
    assert done.stderr.count("error:") == 1
    assert "rank 0 failed: 3 records of the data cannot be trained on" in done.stderr
    assert "data.max_corrupt" in done.stderr


def test_a_loss_that_is_not_a_number_ends_the_run(
    tmp_path: Path, config: str, shardwise: Run
) -> None:
    words = (f"runs_dir={tmp_path}", "optim.lr=1e30", "optim.clip_norm=null")
    done = shardwise("train", config, *words, "cluster.name=1xCPU", expect=7)
    assert done.stderr.count("error:") == 1
    assert "batches in a row gave no finite gradient" in done.stderr
    assert "no checkpoint is left to go back to" in done.stderr
    assert "lower the rate: optim.lr=" in done.stderr
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def rank_process(launcher: int, rank: int) -> int:
    """The process id of one rank below a command that was forked off."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == launcher and rank_of(int(folder.name)) == rank:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


def test_a_killed_rank_is_named_once(tmp_path: Path, config: str) -> None:
    words = (f"runs_dir={tmp_path}", "train.steps=100000", "train.max_restarts=0")
    stdout, stderr = tmp_path / "stdout", tmp_path / "stderr"
    command = Command(("train", config, *words), stdout, stderr)
    deadline = time.monotonic() + TIMEOUT_S
    while not (stdout.exists() and "\nstep " in stdout.read_text()):
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(rank_process(command.pid, 1), signal.SIGKILL)
    assert command.wait(TIMEOUT_S) == 6
    said = stderr.read_text()
    assert said.count("error:") == 1
    assert "rank 1 failed: killed by signal SIGKILL" in said
    assert "out of memory" in said
    assert "run the same command again to resume" in said
    assert "Traceback" not in said
