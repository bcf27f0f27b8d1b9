"""Several sites train apart and join: as plain PyTorch does it, in every format, after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rank_pool import Ranks
from site_runs import Batch, SiteRun, train_plainly_apart, train_sites
from tiny_runs import Arrays, Settings, tiny_plan

from shardwise.checkpoint.store import list_checkpoints
from shardwise.errors import ExitCode, UserError
from shardwise.training import loop, rank_run

pytestmark = pytest.mark.dist

Pools = Callable[[int], Ranks]
TWO_SITES: Settings = {
    "mesh.site": 2,
    "diloco.steps": 2,
    "train.steps": 6,
    "checkpoint.every": 2,
    "optim.warmup_steps": 0,
}
STREAMING: Settings = {**TWO_SITES, "train.steps": 8, "diloco.steps": 4, "checkpoint.every": 4}
STREAMING = {**STREAMING, "diloco.fragments": 2, "diloco.overlap_steps": 1}


def distance(one: Arrays, other: Arrays) -> float:
    """The largest relative difference of a parameter."""
    assert one.keys() == other.keys()
    return max(
        float(np.linalg.norm(one[name] - other[name]) / np.linalg.norm(other[name])) for name in one
    )


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def parts_of(runs: list[SiteRun]) -> list[list[Batch]]:
    """What each site read in every step."""
    sites: dict[int, list[SiteRun]] = {}
    for run in runs:
        sites.setdefault(run.site, []).append(run)
    return [
        [
            (torch.cat([inputs for inputs, _ in step]), torch.cat([labels for _, labels in step]))
            for step in zip(*(run.batches for run in of_site), strict=True)
        ]
        for _, of_site in sorted(sites.items())
    ]


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (2, {}),
        (4, {"shard.strategy": "full_shard"}),
        pytest.param(4, {"shard.strategy": "no_shard"}, marks=pytest.mark.long),
        (4, {"mesh.site": 4, "train.global_batch": 16}),
    ],
    ids=["alone", "full_shard", "no_shard", "four"],
)
def test_sites_join_as_plain_sgd_would_join_them(ranks: Pools, world: int, more: Settings) -> None:
    settings = {**TWO_SITES, **more}
    runs = ranks(world).run(train_sites, world, settings)
    every = (settings, parts_of(runs))
    [plain] = ranks(1).run(_plain, *every)
    assert all(distance(run.common, plain) < 1e-5 for run in runs)
    # All ranks end with the common model, to the last bit.
    assert all(same(run.own, run.common) and same(run.common, runs[0].common) for run in runs)
    assert len(runs[0].joined) == 3 and runs[0].joined[0].norm > 0


def _plain(settings: Settings, parts: list[list[Batch]]) -> Arrays:
    return train_plainly_apart(settings, parts, every=2, lr=0.7, momentum=0.9)


@pytest.mark.long
def test_int8_and_fragments_stay_near_fp32(ranks: Pools) -> None:
    settings = {**TWO_SITES, "shard.strategy": "full_shard"}
    whole = ranks(4).run(train_sites, 4, settings)
    coded = ranks(4).run(train_sites, 4, {**settings, "diloco.exchange": "int8"})
    assert 0 < distance(coded[0].common, whole[0].common) < 1e-3
    assert all(same(run.common, coded[0].common) for run in coded)
    # A byte for each number, and a scale for 256 of them.
    assert coded[0].joined[0].sent_bytes / whole[0].joined[0].sent_bytes == pytest.approx(
        (1 + 4 / 256) / 4, abs=1e-3
    )
    streamed = ranks(4).run(train_sites, 4, {**STREAMING, "shard.strategy": "full_shard"})
    assert [each.fragment for each in streamed[0].joined] == [0, 1, 0, 1]
    assert all(same(run.common, streamed[0].common) for run in streamed)
    # What a site has learnt since it sent its part is not lost.
    assert not same(streamed[0].own, streamed[0].common)
    assert not same(streamed[0].own, streamed[2].own)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(TWO_SITES, id="at once", marks=pytest.mark.long),
        pytest.param(STREAMING, id="streaming"),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    ranks: Pools, tmp_path: Path, settings: Settings
) -> None:
    settings = {**settings, "shard.strategy": "full_shard"}
    half = settings["train.steps"] // 2 // settings["diloco.steps"] * settings["diloco.steps"]
    went_on = ranks(4).run(_train_in, 4, settings, tmp_path, half)
    resumed = ranks(4).run(_train_in, 4, settings, tmp_path, 0)
    for one, other in zip(went_on, resumed, strict=True):
        assert same(one.common, other.common) and same(one.momentum, other.momentum)
        assert same(one.own, other.own)
    # Whoever knows nothing of sites reads the model that they agree on.
    plain = {**settings, "mesh.site": 1}
    alone = {name: each for name, each in plain.items() if not name.startswith("diloco.")}
    read = ranks(4).run(_train_in, 4, {**alone, "train.steps": half}, tmp_path, 0)
    again = ranks(4).run(_train_in, 4, {**settings, "train.steps": half}, tmp_path, 0)
    assert same(read[0].own, again[0].common)


def test_a_synchronous_run_goes_on_with_sites(ranks: Pools, tmp_path: Path) -> None:
    alone: Settings = {"train.steps": 2, "checkpoint.every": 2}
    before = ranks(2).run(_train_in, 2, alone, tmp_path, 2)
    after = ranks(2).run(_train_in, 2, {**TWO_SITES, "train.steps": 2}, tmp_path, 0)
    assert all(same(run.common, before[0].own) for run in after)
    assert all(not run.momentum[name].any() for run in after for name in run.momentum)


def _train_in(world: int, settings: Settings, root: Path, save_at: int) -> SiteRun:
    return train_sites(world, settings, root=root, save_at=save_at)


def spoil(
    world: int, settings: Settings, bad_ranks: tuple[int, ...], spoilt: tuple[int, ...]
) -> str:
    """A whole run, in which some ranks have a loss that is not finite in some batches."""
    position, attach, seed_step = -1, loop.attach_training_loss, loop.seed_step

    def note(seed: int, now: int, token_rank: int) -> None:
        nonlocal position
        position = now
        seed_step(seed, now, token_rank)

    def attach_spoilt(session: Any, say: Any) -> None:
        attach(session, say)
        sum_loss = session.model.sum_loss
        if session.mesh.world.rank in bad_ranks:
            session.model.sum_loss = lambda *args: (
                sum_loss(*args) * (float("nan") if position in spoilt else 1.0)
            )

    with (
        mock.patch.object(loop, "attach_training_loss", attach_spoilt),
        mock.patch.object(loop, "seed_step", note),
    ):
        try:
            rank_run.run(tiny_plan(world, settings), lambda text: None)
        except UserError as error:
            assert error.code == ExitCode.DIVERGED
            return str(error)
    return ""


def test_a_batch_that_one_site_skips_is_skipped_by_all(ranks: Pools, tmp_path: Path) -> None:
    settings = {**TWO_SITES, "runs_dir": str(tmp_path), "train.check_loss": False}
    (tmp_path / "run").mkdir()
    assert ranks(2).run(spoil, 2, settings, (1,), (1,)) == ["", ""]
    found = list_checkpoints(tmp_path / "run" / "checkpoints")
    # The second site has read a batch more before the first outer step, and the first one follows.
    assert [(each.step, each.manifest.position) for each in found] == [(2, 3), (4, 5), (6, 7)]


def test_a_site_that_cannot_go_on_says_so(ranks: Pools, tmp_path: Path) -> None:
    settings = {**TWO_SITES, "runs_dir": str(tmp_path), "train.check_loss": False}
    (tmp_path / "run").mkdir()
    settings = {**settings, "train.max_nonfinite": 1}
    for said in ranks(2).run(spoil, 2, settings, (0, 1), (2, 3)):
        assert "2 batches in a row" in said and "a site cannot go back alone" in said
