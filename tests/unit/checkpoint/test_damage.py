"""Whatever happens to the bytes of a checkpoint is found, and the file is named.

300 random changes run always; 2,500 where SHARDWISE_CHAOS is set.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from trained import open_saver, save, start_session

from shardwise.checkpoint import restore
from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.restore import find_good
from shardwise.checkpoint.store import (
    Entry,
    final_path,
    list_checkpoints,
    list_entries,
    partial_path,
)
from shardwise.parallel.mesh import World

NUM_CHANGES = 2500 if os.environ.get("SHARDWISE_CHAOS") else 300
KINDS = ("flip", "truncate", "delete", "append", "swap", "swap steps")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real checkpoints of a training state, of steps 1 and 2."""
    root = tmp_path_factory.mktemp("damage")
    session = start_session(root)
    saver = open_saver(session, root / "checkpoints")
    for step in (1, 2):
        assert save(session, saver, step).error is None
    saver.close()
    return root / "checkpoints"


@pytest.fixture
def store(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def change(kind: str, path: Path, other: Path, dice: random.Random) -> None:
    """Damage `path`, or exchange it with `other`."""
    data = path.read_bytes()
    if kind == "flip":
        bit = dice.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
    elif kind == "truncate":
        path.write_bytes(data[: dice.randrange(len(data))])
    elif kind == "append":
        path.write_bytes(data + dice.randbytes(dice.randint(1, 64)))
    elif kind == "delete":
        path.unlink()
    else:
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)


def test_every_change_is_found_and_named(store: Path) -> None:
    dice = random.Random(0)
    first, second = final_path(store, 1), final_path(store, 2)
    whole = {path: path.read_bytes() for path in sorted(store.glob("*/*"))}
    names = sorted(path.name for path in second.iterdir())
    assert names == ["manifest.json", "plan.json", "rank-00000.bin", "tensors.json"]
    assert sum(map(len, whole.values())) < 120_000
    seen: Counter[str] = Counter()
    while seen.total() < NUM_CHANGES:
        kind, name = KINDS[seen.total() % len(KINDS)], dice.choice(names)
        other = (first / name) if kind == "swap steps" else second / dice.choice(names)
        if kind.startswith("swap") and whole[other] == whole[second / name]:
            continue
        change(kind, second / name, other, dice)
        found = check_checkpoint(second)
        # A broken manifest vouches for nothing beside it, so it may be the only one named.
        suspects = {name, "manifest.json"} if kind == "swap" else {name}
        if kind == "swap steps" and name == "manifest.json":
            suspects = {"rank-00000.bin"}
        assert suspects & {damage.file for damage in found}, (kind, name, found)
        assert all(damage.reason for damage in found)
        seen[kind] += 1
        for path in {second / name, other}:
            path.write_bytes(whole[path])
    assert min(seen.values()) >= NUM_CHANGES // len(KINDS)
    assert check_checkpoint(first) == check_checkpoint(second) == []


@pytest.mark.parametrize("name", ["rank-00000.bin", "tensors.json", "plan.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["flip", "truncate", "delete", "append"])
def test_a_run_falls_back_to_the_one_before(store: Path, name: str, kind: str) -> None:
    told: list[tuple[str, list[str]]] = []
    change(kind, final_path(store, 2) / name, store, random.Random(1))
    found = find_good(
        store, World.joined(), verify=True, tell=lambda path, why: told.append((path.name, why))
    )
    assert found is not None
    assert found.step == 1
    ((path, reasons),) = told
    assert path == "step-00000002"
    assert reasons[0].startswith(f"{name}: ")
    quarantined, good = sorted(list_entries(store), key=lambda entry: entry.state, reverse=True)
    assert (quarantined.state, good.state) == ("quarantined", "not verified")
    assert quarantined.reason == "\n".join(reasons)


def test_a_save_that_is_published_late_is_gone_or_found(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that has lost the run directory comes to its rename when the next one has looked."""
    final, partial = final_path(store, 2), partial_path(store, 2, epoch=1)
    final.rename(partial)
    look = restore.list_entries

    def look_before_the_rename(root: Path) -> list[Entry]:
        entries = look(root)
        with suppress(FileNotFoundError):
            partial.rename(final)
        return entries

    monkeypatch.setattr(restore, "list_entries", look_before_the_rename)
    found = find_good(store, World.joined(), verify=True, tell=lambda path, why: None)
    assert found is not None
    assert found.step == list_checkpoints(store)[-1].step


def test_nothing_good_is_nothing_found(store: Path) -> None:
    told: list[Path] = []
    for step in (1, 2):
        change("flip", final_path(store, step) / "rank-00000.bin", store, random.Random(step))
    assert (
        find_good(store, World.joined(), verify=True, tell=lambda path, why: told.append(path))
        is None
    )
    assert [path.name for path in told] == ["step-00000002", "step-00000001"]
    assert {entry.state for entry in list_entries(store)} == {"quarantined"}


def test_without_verification_sizes_are_still_judged(store: Path) -> None:
    change("flip", final_path(store, 2) / "rank-00000.bin", store, random.Random(1))
    found = find_good(store, World.joined(), verify=False, tell=lambda path, why: None)
    assert found is not None
    assert found.step == 2
    change("append", final_path(store, 2) / "rank-00000.bin", store, random.Random(1))
    found = find_good(store, World.joined(), verify=False, tell=lambda path, why: None)
    assert found is not None
    assert found.step == 1
