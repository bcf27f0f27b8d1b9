from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import SHARD, make_model_checkpoint

from shardwise.checkpoint.durable_files import write_file
from shardwise.checkpoint.store import begin, quarantine
from shardwise.cli.main import main
from shardwise.lease.take import hold_run
from shardwise.units import format_bytes

SHARD_BYTES = 4096
Cli = pytest.CaptureFixture[str]


def save(run: Path, step: int, loss: float | None = 2.5) -> None:
    created = time.time() - 7200
    make_model_checkpoint(
        run / "checkpoints", step, SHARD_BYTES, loss=loss, world_size=8, created=created
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 20, 40 and 60."""
    for step in (20, 40, 60):
        save(tmp_path / "demo", step)
    return tmp_path / "demo"


def shardwise(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["shardwise", "checkpoint", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def shard_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}" / SHARD


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_ls_shows_every_state(run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run / "checkpoints"
    quarantine(root / "step-00000020", [f"{SHARD}: has 1 bytes", "plan.json: is gone"])
    shard_of(run, 60).write_bytes(b"short")
    write_file(begin(root, 80) / SHARD, bytes(2048))
    assert shardwise(monkeypatch, "ls", run) == 5
    output = capsys.readouterr()
    header, first, second, third, fourth = (
        line.split(maxsplit=8) for line in output.out.splitlines()
    )
    assert header == ["step", "size", "age", "state", "ranks", "loss", "held-out", "reason"]
    assert first[0] == "20"
    assert first[4:6] == ["quarantined", "-"]
    assert first[8] == f"{SHARD}: has 1 bytes; plan.json: is gone"
    assert second[0] == "40"
    assert second[3:] == ["2h00m", "not", "verified", "8", "2.5000", "-"]
    assert (third[0], third[4]) == ("60", "damaged")
    assert third[8] == f"{SHARD}: has 5 bytes, {SHARD_BYTES} were written"
    assert fourth[:3] == ["80", "2.0", "KiB"]
    assert fourth[4] == "partial"
    assert "step 60" in output.err


def test_ls_of_whole_ones_ends_well(
    run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 80, loss=None)
    quarantine(shard_of(run, 20).parent, ["set aside long ago"])
    assert shardwise(monkeypatch, "ls", run) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last[-5:] == ["not", "verified", "8", "-", "-"]


def flip(path: Path) -> None:
    """One bit, so that the size and the manifest stay right."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls_calls_nothing_good_that_it_has_not_read(
    run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(shard_of(run, 40))
    assert shardwise(monkeypatch, "ls", run) == 0
    said = capsys.readouterr().out
    assert said.count("not verified") == 3
    assert "good" not in said
    assert shardwise(monkeypatch, "ls", run, "--verify") == 5
    output = capsys.readouterr()
    rows = [line.split() for line in output.out.splitlines()[1:]]
    assert [(row[0], row[4]) for row in rows] == [("20", "good"), ("40", "damaged"), ("60", "good")]
    assert "its content has changed (sha256 differs)" in output.out
    assert "damaged checkpoints" in output.err and "step 40" in output.err


@pytest.mark.parametrize(
    "words", [("ls",), ("ls", "--verify"), ("verify",), ("prune", "--keep", "2")]
)
def test_looking_after_checkpoints_needs_no_torch(run: Path, words: tuple[str, ...]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from shardwise.cli.main import main; "
        f"sys.argv[1:] = ['checkpoint', {words[0]!r}, {str(run)!r}, *{words[1:]!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_hashing_files_imports_no_torch_where_there_is_one(run: Path) -> None:
    code = (
        "import sys; from shardwise.cli.main import app; "
        f"app(['checkpoint', 'verify', {str(run)!r}, '--hashes-only'], standalone_mode=False); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["3 verified, 0 damaged", "[]"]
    assert done.stdout.count("not compared with its model: --hashes-only") == 3


def test_hashes_alone_tell_damage(run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(shard_of(run, 40))
    assert shardwise(monkeypatch, "verify", run, "--hashes-only") == 5
    assert "step 40: DAMAGED" in capsys.readouterr().out


def test_a_run_without_checkpoints(
    tmp_path: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shardwise(monkeypatch, "ls", tmp_path) == 0
    assert "has no checkpoints yet" in capsys.readouterr().out
    assert shardwise(monkeypatch, "verify", tmp_path) == 0
    assert shardwise(monkeypatch, "prune", tmp_path, "--keep", 1) == 0


@pytest.mark.parametrize("words", [("ls",), ("verify",), ("prune", "--keep", "1")])
def test_a_run_that_does_not_exist(
    tmp_path: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    assert shardwise(monkeypatch, *words, tmp_path / "nowhere") == 2
    assert "there is no run directory" in capsys.readouterr().err


def test_verify_names_file_and_reason(
    run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_of(run, 40).write_bytes(b"\1" + bytes(SHARD_BYTES - 1))
    (shard_of(run, 60).parent / "bad\x1b[31m").write_text("")
    assert shardwise(monkeypatch, "ls", run) == 0
    capsys.readouterr()
    assert shardwise(monkeypatch, "verify", run) == 5
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        f"step 20: good, {format_bytes(bytes_in(shard_of(run, 20).parent))}",
        "step 40: DAMAGED",
        f"  {SHARD}: its content has changed (sha256 differs)",
        "step 60: DAMAGED",
        "  bad?[31m: does not belong to the checkpoint",
        "3 verified, 2 damaged",
    ]
    assert "damaged checkpoints" in output.err
    assert "step 40, 60" in output.err


def test_verify_of_one_step(run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    shard_of(run, 40).unlink()
    assert shardwise(monkeypatch, "verify", run, "--step", 60) == 0
    assert "1 verified, 0 damaged" in capsys.readouterr().out
    assert shardwise(monkeypatch, "verify", run, "--step", 40) == 5
    assert f"{SHARD}: cannot be read: No such file" in capsys.readouterr().out
    assert shardwise(monkeypatch, "verify", run, "--step", 41) == 2
    assert "there are: 20, 40, 60" in capsys.readouterr().err


def test_verify_sees_a_checkpoint_under_another_name(
    run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_of(run, 60).parent.rename(run / "checkpoints" / "step-00000070")
    assert shardwise(monkeypatch, "verify", run, "--step", 70) == 5
    assert "manifest.json: is of step 60, not 70" in capsys.readouterr().out


def test_prune_says_what_it_removed(
    run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(begin(run / "checkpoints", 80) / SHARD, bytes(1000))
    before = names(run)
    held, oldest = bytes_in(run / "checkpoints"), format_bytes(bytes_in(shard_of(run, 20).parent))
    assert shardwise(monkeypatch, "prune", run, "--keep", 2, "--dry-run") == 0
    assert names(run) == before
    assert capsys.readouterr().out.startswith(f"would remove step-00000020  {oldest}\n")
    assert shardwise(monkeypatch, "prune", run, "--keep", 2) == 0
    assert names(run) == ["step-00000040", "step-00000060"]
    freed = held - bytes_in(run / "checkpoints")
    assert capsys.readouterr().out.splitlines() == [
        f"removed step-00000020  {oldest}",
        "removed partial-step-00000080  1000 B",
        f"{format_bytes(freed)} ({freed} bytes) freed",
    ]


def test_prune_leaves_the_save_of_a_running_job_alone(
    run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_run(run) as lease:
        begin(run / "checkpoints", 80, lease)
        for words, verb in ((("--dry-run",), "would remove"), ((), "removed")):
            assert shardwise(monkeypatch, "prune", run, "--keep", 1, *words) == 0
            said = capsys.readouterr().out.splitlines()
            assert said[0].startswith(f"unfinished saves stay: {run} is in use by another job")
            assert [line.split("  ")[0] for line in said[1:-1]] == [
                f"{verb} step-00000020",
                f"{verb} step-00000040",
            ]
        assert names(run) == ["partial-step-00000080.1", "step-00000060"]
    assert shardwise(monkeypatch, "prune", run, "--keep", 1) == 0
    assert names(run) == ["step-00000060"]


def test_prune_keeps_the_last_good_one(
    run: Path, capsys: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shardwise(monkeypatch, "prune", run, "--keep", 0) == 2
    shard_of(run, 60).write_bytes(b"\1" + bytes(SHARD_BYTES - 1))
    before = names(run)
    assert shardwise(monkeypatch, "prune", run, "--keep", 1) == 5
    assert "none of the 1 checkpoints that would stay is whole" in capsys.readouterr().err
    assert names(run) == before
    assert shardwise(monkeypatch, "prune", run, "--keep", 2) == 0
    assert names(run) == ["step-00000040", "step-00000060"]


def test_prune_leaves_damaged_ones_to_be_looked_at(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_of(run, 60).unlink()
    quarantine(shard_of(run, 20).parent, ["broken"])
    before = names(run)
    assert shardwise(monkeypatch, "prune", run, "--keep", 1) == 0
    assert names(run) == before


def test_the_installed_command(run: Path) -> None:
    shard_of(run, 60).write_bytes(b"short")
    command = [str(Path(sys.executable).with_name("shardwise")), "checkpoint"]
    done = subprocess.run(
        [*command, "verify", str(run)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 5
    assert f"{SHARD}: has 5 bytes, {SHARD_BYTES} were written" in done.stdout
    assert done.stderr.startswith("error: damaged checkpoints in")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("ls", "shardwise checkpoint ls runs/demo"),
        ("verify", "shardwise checkpoint verify runs/demo --step 60"),
        ("prune", "shardwise checkpoint prune runs/demo --keep 2 --dry-run"),
    ],
)
def test_help_shows_examples_of(
    capsys: Cli, monkeypatch: pytest.MonkeyPatch, word: str, says: str
) -> None:
    assert shardwise(monkeypatch, word, "--help") == 0
    assert says in capsys.readouterr().out
