"""Sites that are jobs of their own die, fall silent and come back; the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from chaos_ranks import LONG, ranks_of
from site_jobs import TIMEOUT_S, Sites

from namespaces import ADDRESSES, DEVICE, two_nodes, why_not_here

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 20
KILLS = int(os.environ.get("SHARDWISE_KILLS", "50"))
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
    # It may make one more before the other one is let in.
    assert members[0] == members[-1] == (0, 1) and (0,) in members
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


@pytest.mark.skipif(not LONG, reason="a minute without a link belongs to `make chaos`")
def test_a_link_is_cut_for_a_minute(tmp_path: Path, started: list[Sites]) -> None:
    """The site beside the council goes on. The other one waits, and joins when the link is back."""
    if (reason := why_not_here()) is not None:
        pytest.skip(reason)
    words = [*FULL, "train.steps=1000000"]
    with two_nodes() as nodes:
        where = {"host": ADDRESSES[0], "nodes": nodes, "patience_s": 15}
        sites = begin(started, Sites(tmp_path / "run", (1, 1), words, **where))
        try:
            for site in (0, 1):
                sites.start_site(site)
            sites.wait_for_round(0, 1)
            subprocess.run(["ip", "-n", nodes[1], "link", "set", DEVICE, "down"], check=True)
            time.sleep(60)
            alone = [each for each in sites.past().rounds.values() if each.members == (0,)]
            subprocess.run(["ip", "-n", nodes[1], "link", "set", DEVICE, "up"], check=True)
            sites.wait_for_round(0, 1)
            for site in (0, 1):
                sites.running[f"site-{site}"].send_signal(signal.SIGTERM)
            sites.wait(lambda: len([e for e in sites.events() if e["event"] == "left"]) == 2)
        finally:
            sites.end()
    print(*sites.events(), sep="\n")
    assert alone and not any(each["event"] == "diverged" for each in sites.events())
    assert any(each.joined == (1,) for each in sites.past().rounds.values())
    print(f"{len(alone)} outer steps alone while the link was cut")


@pytest.mark.skipif(not LONG, reason="an hour of kills belongs to `make chaos`")
def test_fifty_kills(tmp_path: Path, started: list[Sites]) -> None:
    """Whole sites and single ranks die at any moment. Never do two sites have other bits, and a
    replay of all that was decided has the same ones."""
    dice, words = Random(1), [*FULL, "train.steps=1000000", "checkpoint.every=20"]
    sites = begin(started, Sites(tmp_path / "run", (2, 1), words))
    for site in (0, 1):
        sites.start_site(site)
    for killed in range(KILLS):
        sites.wait_for_round(0, 1)
        time.sleep(dice.random() * 3)
        victim = dice.randrange(2)
        if dice.random() < 0.5:
            sites.kill_site(victim)
            sites.start_site(victim)
        else:
            # The launcher of the site starts its ranks again.
            _, rank = dice.choice(sorted(ranks_of(sites.running[f"site-{victim}"].pid).items()))
            os.kill(rank, signal.SIGKILL)
        sites.wait_until_lost(killed)
    sites.wait_for_round(0, 1)
    for site in (0, 1):
        sites.running.pop(f"site-{site}").send_signal(signal.SIGTERM)
    sites.wait(lambda: len([e for e in sites.events() if e["event"] == "left"]) == 2)
    past, events = sites.past(), sites.events()
    assert not any(each["event"] == "diverged" for each in events)
    assert sum(len(each.joined) for each in past.rounds.values()) > KILLS // 2
    print(f"{KILLS} kills, {len(past.rounds)} outer steps, {past.is_exact=}")
    last = max(past.rounds)
    words = [*words, f"train.stop_after={last}"]
    again = begin(started, Sites(tmp_path / "again", (2, 1), words, replay=sites.record))
    for site in (0, 1):
        again.start_site(site)
    again.wait(
        lambda: len([e for e in again.events() if e["event"] == "left"]) == 2, 10 * TIMEOUT_S
    )
    found = again.past()
    assert found.rounds.keys() == past.rounds.keys()
    assert all(found.rounds[step].digest == each.digest for step, each in past.rounds.items())
