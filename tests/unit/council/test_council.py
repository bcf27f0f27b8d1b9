"""Who takes part in an outer step: whatever dies, is late or comes back, all members agree."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardwise.council.council import Council, mutual
from shardwise.council.history import Past

PATIENCE = 10.0


def entering(step: int = 0, digest: str = "", **more: Any) -> dict[str, Any]:
    said = {"say": "enter", "step": step, "position": step, "fresh": True, "end": 100}
    return {**said, "digest": digest or f"d{step}", "about": {}, "ranks": ["here"], **more}


def ready(step: int, digest: str = "") -> dict[str, Any]:
    said = {"say": "ready", "step": step, "position": step, "digest": digest or f"d{step - 1}"}
    return {**said, "ranks": ["here"]}


def got(step: int, *sites: int) -> dict[str, Any]:
    return {"say": "got", "step": step, "from": list(sites)}


def leaving(step: int) -> dict[str, Any]:
    return {"say": "leave", "step": step, "finished": True, "digest": f"d{step}"}


def said(replies: Iterable[tuple[int, dict[str, Any]]]) -> dict[int, str]:
    return {site: reply["say"] for site, reply in replies}


def begun(num_sites: int = 2) -> Council:
    council = Council(num_sites, PATIENCE)
    for site in range(num_sites - 1):
        assert council.hear(site, entering(), 0.0) == []
    assert set(said(council.hear(num_sites - 1, entering(), 0.0)).values()) == {"admitted"}
    return council


def test_an_outer_step_of_all_sites() -> None:
    council = begun()
    assert council.hear(0, ready(1), 1.0) == []
    assert said(council.hear(1, ready(1), 2.0)) == {0: "exchange", 1: "exchange"}
    assert council.hear(1, got(1, 0, 1), 3.0) == []
    replies = council.hear(0, got(1, 0, 1), 3.0)
    assert said(replies) == {0: "commit", 1: "commit"}
    assert replies[0][1]["members"] == (0, 1) and replies[0][1]["takers"] == {}
    # A reply that was lost is given again.
    assert said(council.hear(1, got(1, 0, 1), 4.0)) == {1: "commit"}


def test_a_site_that_dies_is_left_behind_and_joins_later() -> None:
    council = begun()
    council.hear(0, ready(1), 1.0)
    assert said(council.lose(1)) == {0: "exchange"}
    assert said(council.hear(0, got(1, 0), 1.0)) == {0: "commit"}
    assert council.hear(1, entering(0), 2.0) == []
    council.hear(0, ready(2), 3.0)
    replies = dict(council.hear(0, got(2, 0), 3.0))
    assert replies[0]["takers"] == {"1": ["here"]} and replies[0]["members"] == (0,)
    assert replies[1]["say"] == "admitted" and replies[1]["giver"] == 0
    assert replies[1]["step"] == 2 and council.members == {0, 1}


def test_a_silent_site_is_waited_for_only_so_long() -> None:
    council = begun()
    council.hear(0, ready(1), 1.0)
    assert council.tick(1.0 + PATIENCE) == []
    assert said(council.tick(1.1 + PATIENCE)) == {0: "exchange"}
    # It was cut off, and comes back with the step that the other has made alone.
    assert said(council.hear(1, ready(1), 12.0)) == {1: "behind"}


def test_a_link_cut_within_an_exchange_leaves_one_of_two() -> None:
    council = begun()
    council.hear(0, ready(1), 1.0)
    council.hear(1, ready(1), 1.0)
    council.hear(0, got(1, 0), 2.0)
    # Neither has the other's part, and both can reach the council.
    assert said(council.hear(1, got(1, 1), 3.0)) == {0: "commit", 1: "behind"}
    council = begun()
    council.hear(0, ready(1), 1.0)
    council.hear(1, ready(1), 1.0)
    council.hear(1, got(1, 0, 1), 2.0)
    # The second has all, the first is silent: what it sent does not count.
    replies = dict(council.tick(2.1 + PATIENCE))
    assert replies[0]["say"] == "behind" and replies[1]["members"] == (1,)


def test_other_bits_are_not_mixed() -> None:
    council = begun()
    council.hear(0, ready(1, "one"), 1.0)
    assert said(council.hear(1, ready(1, "other"), 1.0)) == {0: "exchange", 1: "behind"}
    assert [each["event"] for each in council.events] == ["start", "diverged", "lost"]


def test_sites_begin_with_the_newest_state() -> None:
    council = Council(3, PATIENCE)
    council.hear(0, entering(4), 0.0)
    council.hear(1, entering(8), 0.0)
    replies = council.hear(2, entering(8), 0.0)
    assert said(replies) == {1: "admitted", 2: "admitted"}
    council.hear(1, ready(9), 1.0)
    council.hear(2, ready(9), 1.0)
    council.hear(1, got(9, 1, 2), 1.0)
    assert said(council.hear(2, got(9, 1, 2), 1.0)) == {1: "commit", 2: "commit", 0: "admitted"}


def test_one_site_begins_alone_where_the_others_do_not_come() -> None:
    council = Council(2, PATIENCE)
    council.hear(1, entering(4), 0.0)
    assert council.tick(PATIENCE) == []
    assert said(council.tick(PATIENCE + 0.1)) == {1: "admitted"}


def test_a_council_that_was_restarted_goes_on() -> None:
    before = begun()
    before.hear(0, ready(1), 1.0)
    before.hear(1, ready(1), 1.0)
    council = Council(2, PATIENCE, past=Past.of(before.events))
    assert said(council.hear(0, got(1, 0, 1), 2.0)) == {0: "again"}
    council.hear(0, ready(1), 2.0)
    assert said(council.hear(1, ready(1), 2.0)) == {0: "exchange", 1: "exchange"}
    # A site that has died meanwhile is not waited for.
    council = Council(2, PATIENCE, past=Past.of(before.events))
    council.hear(0, ready(1), 2.0)
    assert said(council.tick(2.1 + PATIENCE)) == {0: "exchange"}


def test_who_comes_too_late_hears_so() -> None:
    council = begun()
    council.lose(1)
    council.hear(0, leaving(100), 1.0)
    assert said(council.hear(1, entering(4), 2.0)) == {1: "finished"}
    assert council.hear(1, entering(4, end=200), 2.0) == []


def test_sites_of_different_runs_are_refused() -> None:
    council = Council(2, PATIENCE)
    council.hear(0, entering(about={"train.steps": 8}), 0.0)
    [(site, reply)] = council.hear(1, entering(about={"train.steps": 9}), 0.0)
    assert (site, reply["say"], reply["what"]) == (1, "other", "train.steps")


@pytest.mark.parametrize(
    ("found", "left"),
    [
        ({0: {0, 1}, 1: {0, 1}}, {0, 1}),
        ({0: {0}, 1: {0, 1}}, {0}),
        ({0: {0, 2}, 1: {1}, 2: {0, 1, 2}}, {0, 2}),
        ({0: {0}, 1: {1, 2}, 2: {1, 2}}, {1, 2}),
        ({}, set()),
    ],
)
def test_those_who_have_each_other_go_on(found: dict[int, set[int]], left: set[int]) -> None:
    assert mutual({site: frozenset(others) for site, others in found.items()}) == left


@dataclass
class Site:
    """What a site does: a model is the list of outer steps that it came from."""

    number: int
    step: int = 0
    model: tuple[Any, ...] = ()
    state: str = "off"

    def enter(self, fresh: bool = True) -> dict[str, Any]:
        self.state = "entering"
        return entering(self.step, repr(self.model), fresh=fresh)


@dataclass
class Play:
    """Sites and a council under random deaths and returns."""

    dice: random.Random
    num_sites: int
    script: Past | None = None
    now: float = 0.0
    sites: list[Site] = field(init=False)
    saved: dict[int, tuple[int, tuple[Any, ...]]] = field(init=False)
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.council = Council(self.num_sites, PATIENCE, script=self.script)
        self.sites = [Site(number) for number in range(self.num_sites)]
        self.saved = {number: (0, ()) for number in range(self.num_sites)}

    def hear(self, site: Site, message: dict[str, Any]) -> None:
        self.take(self.council.hear(site.number, message, self.now))

    def take(self, replies: Iterable[tuple[int, dict[str, Any]]]) -> None:
        self.events += self.council.events
        self.council.events.clear()
        models = {site.number: site.model for site in self.sites}
        for number, reply in replies:
            site = self.sites[number]
            match reply["say"]:
                case "admitted":
                    if reply["giver"] is not None:
                        made = (reply["step"], self.committed)
                        site.model = (*models[reply["giver"]], made)
                    site.step, site.state = reply["step"], "training"
                case "exchange":
                    site.state, self.among = "exchanging", [int(each) for each in reply["sites"]]
                case "commit":
                    self.committed = tuple(reply["members"])
                    site.model = (*site.model, (site.step + 1, self.committed))
                    site.step, site.state = site.step + 1, "training"
                    if site.step % 3 == 0:
                        self.saved[number] = (site.step, site.model)
                case "behind":
                    self.hear(site, site.enter(fresh=False))

    def move(self) -> None:
        """Something happens somewhere."""
        self.now += self.dice.random() * 2
        site = self.dice.choice(self.sites)
        if self.script is None and site.state != "off" and self.dice.random() < 0.05:
            site.state = "off"
            self.take(self.council.lose(site.number))
        elif site.state == "off":
            site.step, site.model = self.saved[site.number]
            self.hear(site, site.enter())
        elif site.state == "training":
            site.state = "waiting"
            self.hear(site, ready(site.step + 1, repr(site.model)))
        elif site.state == "exchanging":
            site.state = "waiting"
            alive = [one for one in self.among if self.sites[one].state != "off"]
            self.hear(site, got(site.step + 1, *{*alive, site.number}))
        self.take(self.council.tick(self.now))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_dies_all_members_have_one_model_and_a_replay_makes_it_again(seed: int) -> None:
    play = Play(random.Random(seed), 2 + seed % 2)
    while max(site.step for site in play.sites) < 12:
        play.move()
    models: dict[int, set[tuple[Any, ...]]] = {}
    for site in play.sites:
        if site.number in play.council.members:
            models.setdefault(site.step, set()).add(site.model)
    assert all(len(found) == 1 for found in models.values())
    assert not any(event["event"] == "diverged" for event in play.events)
    past = Past.of(play.events)
    last = max(past.rounds)
    again = Play(random.Random(seed + 1), play.num_sites, script=past)
    for _ in range(20000):
        again.move()
        if max(site.step for site in again.sites) == last:
            break
    found = Past.of(again.events)
    made = {step: (each.members, each.digest) for step, each in found.rounds.items()}
    assert made == {step: (each.members, each.digest) for step, each in past.rounds.items()}
