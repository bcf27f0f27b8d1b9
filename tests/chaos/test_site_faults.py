"""Sites that are jobs of their own die, fall silent and come back; the others go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_jobs import Sites

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 20
FULL = ("shard.strategy=full_shard",)


@pytest.fixture
def started() -> Iterator[list[Sites]]:
    found: list[Sites] = []
    yield found
    for sites in found:
        sites.end()


def begin(started: list[Sites], sites: Sites) -> Sites:
    started.append(sites)
    sites.folder.mkdir()
    sites.start_council()
    sites.wait(lambda: "waiting for" in sites.said("council"))
    return sites


def test_a_site_dies_and_comes_back_and_a_replay_has_the_same_bits(
    tmp_path: Path, started: list[Sites]
) -> None:
    # Sites of one rank and of two cut the model at different places.
    words = [*FULL, f"train.steps={STEPS}"]
    sites = begin(started, Sites(tmp_path / "run", (2, 1), words))
    council = sites.running["council"]
    sites.start_site(0)
    sites.start_site(1)
    sites.wait_for_round(0, 1)
    council.send_signal(signal.SIGSTOP)
    sites.kill_site(1)
    # The other site makes an outer step alone while this one already waits to come back.
    sites.start_site(1)
    sites.wait_until_it_waits(1)
    council.send_signal(signal.SIGCONT)
    sites.finish()
    past = sites.past()
    members = [each.members for each in past.rounds.values()]
    assert members[0] == members[-1] == (0, 1) and members.count((0,)) == 1
    assert [each.joined for each in past.rounds.values()].count((1,)) == 1
    ends = [each for each in sites.events() if each["event"] == "left"]
    assert [each["digest"] for each in ends] == [past.digest] * 2 and past.finished == STEPS
    assert sites.bits(0, STEPS) == sites.bits(1, STEPS)

    again = begin(started, Sites(tmp_path / "again", (2, 1), words, replay=sites.record))
    again.start_site(0)
    again.start_site(1)
    again.finish()
    assert f"{STEPS // 2} outer steps replayed with the same bits" in again.said("council")
    assert again.bits(0, STEPS) == again.bits(1, STEPS) == sites.bits(0, STEPS)
