from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SHARD, make_checkpoint

from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.durable_files import write_file
from shardwise.checkpoint.store import (
    begin,
    clear_partials,
    final_path,
    list_checkpoints,
    list_entries,
    outdated,
    quarantine,
    remove,
)


def prune(root: Path, keep: int) -> list[Path]:
    old = outdated(root, keep)
    remove(root, old)
    return [found.path for found in old]


def states(root: Path) -> dict[str, str]:
    return {entry.path.name: entry.state for entry in list_entries(root)}


def steps(root: Path) -> list[int]:
    return [found.step for found in list_checkpoints(root)]


def test_a_published_checkpoint_is_found_and_whole(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, 60)
    assert made.path == final_path(tmp_path, 60) == tmp_path / "step-00000060"
    assert list_checkpoints(tmp_path) == [made]
    assert check_checkpoint(made.path) == []
    assert sorted(made.manifest.files) == ["plan.json", SHARD, "tensors.json"]
    assert not list(tmp_path.glob("partial-*"))


def test_a_published_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    before = (make_checkpoint(tmp_path, 1).path / SHARD).read_bytes()
    with pytest.raises(OSError, match=r"not empty|exists"):
        make_checkpoint(tmp_path, 1)
    assert (final_path(tmp_path, 1) / SHARD).read_bytes() == before
    assert steps(tmp_path) == [1]


def test_a_save_that_has_not_ended_is_never_chosen(tmp_path: Path) -> None:
    write_file(begin(tmp_path, 7) / SHARD, b"half")
    assert states(tmp_path) == {"partial-step-00000007": "partial"}
    assert steps(tmp_path) == []


def test_a_save_begins_with_nothing(tmp_path: Path) -> None:
    write_file(begin(tmp_path, 7) / SHARD, b"left by a kill")
    assert list(begin(tmp_path, 7).iterdir()) == []


def test_partials_are_cleared_and_nothing_else(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    begin(tmp_path, 2)
    begin(tmp_path, 3)
    clear_partials(tmp_path)
    assert states(tmp_path) == {"step-00000001": "not verified"}


def test_order_is_by_step_and_other_names_are_left_alone(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        make_checkpoint(tmp_path, step)
    for name in ("step-1", "my-step-00000001", "step-00000001.old", "backup"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000005").write_text("a file")
    assert steps(tmp_path) == [9, 20, 100]
    assert len(list_entries(tmp_path)) == 3


def test_a_store_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert list_entries(tmp_path / "checkpoints") == []


def test_sizes_are_judged_at_once(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, 1)
    (made.path / SHARD).write_bytes(b"short")
    (entry,) = list_entries(tmp_path)
    assert (entry.state, entry.checkpoint) == ("damaged", None)
    assert entry.reason == f"{SHARD}: has 5 bytes, 32 were written"


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, 1)
    (made.path / SHARD).unlink()
    (entry,) = list_entries(tmp_path)
    assert (entry.state, entry.reason) == ("damaged", f"{SHARD}: there is no such plain file")


def test_a_checkpoint_under_another_step_is_damaged(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1).path.rename(final_path(tmp_path, 2))
    (entry,) = list_entries(tmp_path)
    assert (entry.state, entry.reason) == ("damaged", "manifest.json: is of step 1, not 2")


def test_a_stray_file_is_named(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, 1)
    (made.path / "notes.txt").write_text("mine")
    (damage,) = check_checkpoint(made.path)
    assert str(damage) == "notes.txt: does not belong to the checkpoint"


def test_everything_that_is_wrong_is_named(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, 1)
    (made.path / SHARD).write_bytes(bytes(32))
    (made.path / "plan.json").unlink()
    assert sorted(damage.file for damage in check_checkpoint(made.path)) == ["plan.json", SHARD]


def test_quarantine_keeps_the_bytes_and_the_reasons(tmp_path: Path) -> None:
    for number, name in enumerate(
        ["quarantined-step-00000001", "quarantined-step-00000001.1", "quarantined-step-00000001.2"]
    ):
        made = make_checkpoint(tmp_path, 1)
        target = quarantine(made.path, [f"found {number}", "and more"])
        assert target.name == name
        assert (target / SHARD).read_bytes() == bytes([1]) * 32
    assert set(states(tmp_path).values()) == {"quarantined"}
    assert [entry.reason.splitlines()[0] for entry in list_entries(tmp_path)] == [
        "found 0",
        "found 1",
        "found 2",
    ]


@pytest.mark.parametrize(
    ("keep", "left"), [(5, [1, 2, 3]), (3, [1, 2, 3]), (2, [2, 3]), (1, [3]), (0, [3]), (-4, [3])]
)
def test_the_oldest_go_and_the_last_good_one_stays(
    tmp_path: Path, keep: int, left: list[int]
) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    removed = prune(tmp_path, keep)
    assert [path.name for path in removed] == [f"step-{s:08d}" for s in (1, 2, 3) if s not in left]
    assert steps(tmp_path) == left
    assert not list(tmp_path.glob("partial-*"))


def test_what_is_damaged_counts_for_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    for step in (2, 3):
        (final_path(tmp_path, step) / SHARD).write_bytes(b"short")
    quarantine(final_path(tmp_path, 3), ["short"])
    assert prune(tmp_path, 1) == []
    assert states(tmp_path) == {
        "step-00000001": "not verified",
        "step-00000002": "damaged",
        "quarantined-step-00000003": "quarantined",
    }


def test_a_kill_while_pruning_leaves_no_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, 1)
    make_checkpoint(tmp_path, 2)

    def die(path: Path, **options: Any) -> None:
        (path / SHARD).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1)
    assert states(tmp_path) == {"partial-step-00000001": "partial", "step-00000002": "not verified"}
