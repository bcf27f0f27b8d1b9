"""Who takes part in an outer step. One process decides, so no two sites can disagree.

A site enters, is admitted, and from then on is a member. Before an outer step all members say that
they are ready. Each then fetches what the others have learnt, and says from whom it has all. The
sites that have each other's parts make the outer step; whoever is missing, late or cut off is left
behind. A site that is left behind, or comes back, waits for the next outer step and takes over the
state of a member behind it. So every outer step follows from the one before, and nothing diverges.

This is arithmetic on messages, without sockets or clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.council.history import OuterRound, Past

Message = Mapping[str, Any]
Reply = tuple[int, dict[str, Any]]


@dataclass(slots=True)
class _Exchange:
    """The outer step that is being made."""

    step: int
    since: float | None
    """Since when somebody waits for others; None while all of them exchange."""

    ready: dict[int, Message] = field(default_factory=dict)
    among: frozenset[int] = frozenset()
    """The sites that were told to exchange; empty while some are not ready."""

    got: dict[int, frozenset[int]] = field(default_factory=dict)


class Council:
    """The sites of a run. Each method returns the replies to send."""

    def __init__(
        self,
        num_sites: int,
        patience_s: float,
        *,
        past: Past | None = None,
        script: Past | None = None,
        now: float = 0.0,
    ) -> None:
        past = past or Past()
        self.num_sites, self.patience_s = num_sites, patience_s
        self.members, self.finished = set(past.members), past.finished
        self.done: set[int] = set()
        """Sites that need nothing any more."""

        self.events: list[dict[str, Any]] = []
        """What has been decided since the caller last took it."""

        self._script = script
        self._about: dict[str, Any] = {}
        """What is the same in all sites, as the first one has said."""

        self._addresses: dict[int, Any] = {}
        self._entering: dict[int, Message] = {}
        self._entered_at = now
        self._unheard = dict.fromkeys(past.members, now)
        self._exchange: _Exchange | None = None
        self._done: OuterRound | None = None
        self._committed: dict[int, dict[str, Any]] = {}

    def hear(self, site: int, message: Message, now: float) -> list[Reply]:
        """A site says something."""
        self._unheard.pop(site, None)
        match message["say"]:
            case "enter":
                return self._enter(site, message, now)
            case "ready":
                return self._ready(site, message, now)
            case "got":
                return self._got(site, message, now)
        return self._leave(site, message)

    def lose(self, site: int) -> list[Reply]:
        """The connection to a site is closed."""
        self._entering.pop(site, None)
        return self._drop([site]) if site in self.members else []

    def tick(self, now: float) -> list[Reply]:
        """Time passes, and some may have been waited for too long."""
        if self._script is not None:
            return self._settle(now)
        late = [s for s, since in self._unheard.items() if now - since > self.patience_s]
        for site in late:
            del self._unheard[site]
        exchange = self._exchange
        began = None if exchange is None else exchange.since
        if exchange is not None and began is not None and now - began > self.patience_s:
            exchange.since = now
            waited = exchange.got if exchange.among else exchange.ready
            late += self.members - waited.keys()
        replies = self._drop(late) if late else []
        return replies + self._settle(now)

    def _enter(self, site: int, message: Message, now: float) -> list[Reply]:
        if message["end"] <= self.finished:
            return [(site, self._over(site))]
        self._about = self._about or message["about"]
        if other := [name for name, each in self._about.items() if message["about"][name] != each]:
            theirs, mine = self._about[other[0]], message["about"][other[0]]
            told = {"say": "other", "what": other[0], "theirs": theirs, "mine": mine}
            return [(site, told)]
        # A new process, whose predecessor nobody saw end.
        replies = self._drop([site]) if site in self.members else []
        if not self._entering:
            self._entered_at = now
        self._entering[site], self._addresses[site] = message, message["ranks"]
        return replies + self._settle(now)

    def _ready(self, site: int, message: Message, now: float) -> list[Reply]:
        if site not in self.members or not self._is_in_script(site, message["step"]):
            self.members.discard(site)
            return [(site, {"say": "behind"})]
        step, self._addresses[site] = message["step"], message["ranks"]
        if self._exchange is None:
            self._exchange = _Exchange(step, now)
        if step != self._exchange.step:
            return self._drop([site], {"say": "behind"})
        exchange = self._exchange
        exchange.ready[site] = message
        if site in exchange.among:
            # It has lost the reply, and asks again.
            return [(site, self._told(exchange))]
        return self._settle(now)

    def _got(self, site: int, message: Message, now: float) -> list[Reply]:
        step, exchange = message["step"], self._exchange
        if self._done is not None and self._done.step == step and site in self._committed:
            return [(site, self._committed[site])]
        if site not in self.members:
            return [(site, {"say": "behind"})]
        if exchange is None or site not in exchange.among:
            # This process was started since it said so.
            return [(site, {"say": "again"})]
        exchange.got[site] = frozenset(message["from"])
        exchange.since = now if exchange.since is None else exchange.since
        return self._settle(None)

    def _leave(self, site: int, message: Message) -> list[Reply]:
        step, digest = message["step"], message["digest"]
        self._note("left", site=site, step=step, digest=digest, finished=message["finished"])
        if message["finished"]:
            self.finished = step
            self.done.add(site)
        late = [s for s, each in self._entering.items() if each["end"] <= self.finished]
        for other in late:
            del self._entering[other]
        replies = self._drop([site], quietly=True)
        return [*replies, (site, {"say": "bye"}), *((other, self._over(other)) for other in late)]

    def _over(self, site: int) -> dict[str, Any]:
        self.done.add(site)
        return {"say": "finished", "step": self.finished}

    def _drop(
        self, sites: Iterable[int], reply: dict[str, Any] | None = None, *, quietly: bool = False
    ) -> list[Reply]:
        """Leave these sites behind."""
        replies = []
        for site in sites:
            if site in self.members and not quietly:
                self._note("lost", site=site)
            self.members.discard(site)
            if self._exchange is not None:
                self._exchange.ready.pop(site, None)
                self._exchange.got.pop(site, None)
            if reply is not None:
                replies.append((site, reply))
        if not self.members:
            self._exchange = None
        return replies + self._settle(None)

    def _settle(self, now: float | None) -> list[Reply]:
        """What can be decided now."""
        if not self.members:
            return [] if now is None else self._begin(now)
        exchange = self._exchange
        if exchange is None:
            return []
        if not exchange.among:
            wanted = self._wanted(exchange.step)
            if not wanted <= exchange.ready.keys():
                return []
            if strange := self._strange(exchange, wanted):
                return self._drop(strange, {"say": "behind"})
            exchange.among, exchange.since = frozenset(wanted), None
            return [(site, self._told(exchange)) for site in sorted(exchange.among)]
        if (exchange.among & self.members) <= exchange.got.keys():
            return self._commit(exchange)
        return []

    def _wanted(self, step: int) -> set[int]:
        return self.members if self._script is None else set(self._script.rounds[step].members)

    def _is_in_script(self, site: int, step: int) -> bool:
        if self._script is None:
            return True
        found = self._script.rounds.get(step)
        return found is not None and site in found.members

    def _begin(self, now: float) -> list[Reply]:
        """Admit the sites that have entered, once all are there or have been waited for."""
        there = self._entering
        wanted = set(range(self.num_sites)) if self._script is None else set(self._script.started)
        is_late = self._script is None and now - self._entered_at > self.patience_s
        if not there or not (wanted <= there.keys() or is_late):
            return []
        step = max(message["step"] for message in there.values())
        base = min(site for site, message in there.items() if message["step"] == step)
        # The others take over the state behind the next outer step.
        alike = {"step": step, "digest": there[base]["digest"]}
        same = sorted(s for s, m in there.items() if {k: m[k] for k in alike} == alike)
        exact = all(there[site]["fresh"] for site in same)
        position = max(there[site]["position"] for site in same)
        self._note("start", step=step, members=same, exact=exact, digest=alike["digest"])
        self.members, self._done = set(same), None
        for site in same:
            del self._entering[site]
        reply = {"say": "admitted", "step": step, "position": position, "giver": None}
        return [(site, reply) for site in same]

    def _strange(self, exchange: _Exchange, wanted: Iterable[int]) -> list[int]:
        """Sites whose common model has other bits. That must not happen, and they begin again with
        the bits of the first."""
        digests = {site: exchange.ready[site]["digest"] for site in sorted(wanted)}
        first = next(iter(digests.values()))
        strange = [site for site, digest in digests.items() if digest != first]
        for site in strange:
            self._note("diverged", site=site, step=exchange.step)
        return strange

    def _told(self, exchange: _Exchange) -> dict[str, Any]:
        found = {str(site): self._addresses[site] for site in sorted(exchange.among)}
        return {"say": "exchange", "sites": found}

    def _commit(self, exchange: _Exchange) -> list[Reply]:
        """The outer step of the sites that have each other's parts."""
        together = mutual({s: exchange.got[s] for s in exchange.among & self.members})
        joined = sorted(self._entering)
        if self._script is not None:
            joined = list(self._script.rounds[exchange.step].joined)
            if not set(joined) <= self._entering.keys():
                return []
        giver = min(together)
        ready = exchange.ready
        position = max(ready[site]["position"] for site in together)
        digest = ready[giver]["digest"]
        done = OuterRound(exchange.step, tuple(sorted(together)), tuple(joined), digest)
        self._note("round", step=done.step, members=done.members, joined=joined, digest=digest)
        takers = {str(site): self._addresses[site] for site in joined}
        common = {"step": done.step, "position": position, "giver": giver}
        commit = {"say": "commit", **common, "members": done.members, "takers": takers}
        admitted = {"say": "admitted", **common, "ranks": self._addresses[giver]}
        left = exchange.among - together
        self._exchange, self._done = None, done
        self._committed = dict.fromkeys(sorted(together), commit)
        self.members = {*together, *joined}
        for site in joined:
            del self._entering[site]
        return [
            *((site, commit) for site in sorted(together)),
            *((site, {"say": "behind"}) for site in sorted(left)),
            *((site, admitted) for site in joined),
        ]

    def _note(self, event: str, **values: Any) -> None:
        self.events.append({"event": event, **values})


def mutual(got: Mapping[int, frozenset[int]]) -> set[int]:
    """Sites that all have each other's parts. Whoever lacks most is left out first, and of several
    the last one."""
    left = set(got)

    def lacks(site: int) -> int:
        return sum((o not in got[site]) + (site not in got[o]) for o in left - {site})

    while any(map(lacks, left)):
        left.remove(max(left, key=lambda site: (lacks(site), site)))
    return left
