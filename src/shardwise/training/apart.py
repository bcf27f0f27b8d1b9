"""Sites that are jobs of their own: each may die, be cut off and come back, and may have other
ranks than the others.

The council (`shardwise sites`) says which sites take part in an outer step. Each rank fetches what
the ranks of other sites have learnt about its own numbers, and sums it up in the order of sites, so
all get the same bits. A site that was away, or was left behind, takes over the state of a member:
the common model, its momentum and Adam's moments. It loses its inner steps only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.checkpoint.site_tensors import SiteState
from shardwise.council.site_client import Asker, own_host
from shardwise.parallel.mailbox import Address, Mailbox, Vector, fetch
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.spans import cut, shared, spans_of
from shardwise.parallel.torchao_float8 import own_part
from shardwise.plan.planned import Plan
from shardwise.training.optim import MOMENTS
from shardwise.training.outer import Joined, Outer, Standing
from shardwise.training.site_agreement import about_site, not_admitted

# How often ranks that wait say that they live.
_LOOK_EVERY_S = 0.5
_MOST_FETCHES = 16
# The council may start a little later than sites.
_TELL_AFTER_S = 10.0


class Apart(Outer):
    """This job's end of the outer step. All its ranks call each of these methods together."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        data: str,
        say: Callable[[str], None],
    ) -> None:
        # In this order sites that group parameters differently still agree on where they lie.
        params = [param for param in model.parameters() if param.requires_grad]
        super().__init__(model, [params], mesh, plan.settings.diloco)
        config = self.config
        if config.meet is None:
            raise RuntimeError("sites of one job do not meet elsewhere")
        self.site = mesh.job
        self.optimizer, self.say = optimizer, say
        [self.fragment] = self.fragments
        self._about = about_site(plan, model, data)
        self._replicas = mesh.replicas
        self._length = sum(own_part(param).numel() for param in params)
        count = 1 if self._replicas is None else self._replicas.size()
        place = 0 if self._replicas is None else self._replicas.rank()
        self._part = -(-self._length // count)
        self._first = min(self._length, place * self._part)
        self._end = min(self._length, self._first + self._part)
        self._spans = cut(spans_of(params), self._first, self._end)
        self._mailbox = Mailbox(own_host(config.meet), config.patience_s)
        self._asker = Asker(config.meet, self.site, config.patience_s)
        self._there: Standing | None = None
        self._end_step = 0

    @property
    def state(self) -> SiteState:
        """What a checkpoint keeps of it, which is that of a run with one site."""
        return SiteState(0, 1, self.common, self.momentum, differs=False)

    def enter(self, reached: Standing, end: int) -> Standing:
        """Meet the other sites, and take over their state where they are further."""
        self._end_step = end
        return self._enter(reached, is_fresh=True)

    def step(self, reached: Standing) -> Joined | None:
        """The outer step, where it is due. Afterwards `where` says where this site is."""
        if reached.step % self.config.steps:
            return None
        key = f"learnt/{reached.step}"
        learnt = self.fragment.note_learnt()
        own = self._own(learnt)
        self._mailbox.post(key, [own], {})
        try:
            found = self._exchange(reached, key, own)
        finally:
            sent_bytes = self._mailbox.take_back(key)
        if found is None:
            since = reached.step - self.config.steps
            self.say(f"ALERT: left behind by the other sites after step {since}")
            self._there = self._enter(Standing(since, reached.position), is_fresh=False)
            return None
        commit, mean = found
        self.fragment.join(mean, self.config.lr, self.config.momentum, is_waiting=True)
        self._there = Standing(reached.step, commit["position"])
        self._give(commit)
        now = time.perf_counter() - self.fragment.started
        sites, norm = len(commit["members"]), self.norm(mean)
        return Joined(
            fragment=0, sent_bytes=sent_bytes, exchange_s=now, waited_s=now, norm=norm, sites=sites
        )

    def where(self, reached: Standing) -> Standing:
        """Where this site is after an outer step."""
        return self._there or reached

    def leave(self, step: int, *, finished: bool) -> None:
        """Tell the council, and give nothing more than what was promised."""
        deadline = time.monotonic() + self.config.patience_s
        while any(self.mesh.world.gather(self._mailbox.is_awaited())):
            if self.mesh.world.share(time.monotonic() > deadline):
                break
            time.sleep(_LOOK_EVERY_S)
            self.beat()
        said = {"say": "leave", "step": step, "finished": finished, "digest": self._digest()}
        self._ask(said)
        self._asker.close()
        self._mailbox.close()

    def _exchange(
        self, reached: Standing, key: str, own: Vector
    ) -> tuple[dict[str, Any], Tensor] | None:
        """What was decided, and the mean over the sites that take part; None where this site is
        not one of them."""
        while True:
            told = {"step": reached.step, "position": reached.position, "digest": self._digest()}
            answer = self._ask({"say": "ready", **told, "ranks": self._addresses()})
            if answer["say"] != "exchange":
                return None
            addresses = {int(site): each for site, each in answer["sites"].items()}
            vectors = {self.site: own}
            for site, ranks in addresses.items():
                if site != self.site and (found := self._fetch(ranks, key, 1)) is not None:
                    [vectors[site]] = found[0]
            complete = set.intersection(*map(set, self.mesh.world.gather(sorted(vectors))))
            answer = self._ask({"say": "got", "step": reached.step, "from": sorted(complete)})
            if answer["say"] == "commit":
                return answer, self._mean([vectors[site] for site in answer["members"]])
            if answer["say"] != "again":
                return None

    def _mean(self, vectors: Sequence[Vector]) -> Tensor:
        """The mean of what sites have learnt, which come in the same order everywhere."""
        total = torch.from_numpy(vectors[0].copy())
        for vector in vectors[1:]:
            total += torch.from_numpy(vector)
        return self._spread(total.div_(len(vectors)))

    def _enter(self, reached: Standing, *, is_fresh: bool) -> Standing:
        """Wait until the council admits this site, and begin where it says."""
        while True:
            told = {"step": reached.step, "position": reached.position, "fresh": is_fresh}
            said = {"say": "enter", **told, "about": self._about, "end": self._end_step}
            self._send(said | {"digest": self._digest(), "ranks": self._addresses()})
            self.say(f"site {self.site} waits for the others at {self.config.meet}")
            answer = self._answer()
            if answer["say"] != "admitted":
                raise not_admitted(answer, self.site, reached.step)
            there = Standing(answer["step"], answer["position"])
            if answer["giver"] is None:
                if not is_fresh:
                    self.fragment.begin_again()
                return there
            if self._take(answer):
                return there
            self.say("ALERT: the state of the other sites did not arrive; asking again")

    def _give(self, commit: Mapping[str, Any]) -> None:
        """Hold the state ready for sites that join behind this outer step, and drop older ones."""
        for step in range(commit["step"] - self.config.steps, commit["step"]):
            self._mailbox.take_back(f"state/{step}")
        if commit["giver"] != self.site or not commit["takers"]:
            return
        vectors = [self._own(_flat(tensors)).copy() for tensors in self._state()]
        updates = float(self.optimizer.state[self.fragment.params[0]]["step"])
        ranks = [Address.from_list(each) for site in commit["takers"].values() for each in site]
        takers = sum(any(shared(self._spans, each.spans)) for each in ranks)
        key, about = f"state/{commit['step']}", {"updates": updates}
        self._mailbox.post(key, vectors, about, num_takers=takers)

    def _take(self, answer: Mapping[str, Any]) -> bool:
        """Take over the state of a member. Returns whether all of it has arrived on all ranks."""
        state = self._state()
        found = self._fetch(answer["ranks"], f"state/{answer['step']}", len(state))
        if not all(self.mesh.world.gather(found is not None)) or found is None:
            return False
        vectors, about = found
        with torch.no_grad():
            for tensors, vector in zip(state, vectors, strict=True):
                _fill(tensors, self._spread(torch.from_numpy(vector)))
            for param in self.fragment.params:
                self.optimizer.state[param]["step"].fill_(about["updates"])
        self.fragment.begin_again()
        return True

    def _state(self) -> list[list[Tensor]]:
        """Everything that a site takes over."""
        params, states = self.fragment.params, self.optimizer.state
        for param in params:
            if not states[param]:
                self.optimizer.state_of(param)  # type: ignore[attr-defined]
        moments = [[states[param][name] for param in params] for name in MOMENTS]
        return [self.fragment.common, self.fragment.momentum, *moments]

    def _fetch(
        self, ranks: Sequence[Any], key: str, count: int
    ) -> tuple[list[Vector], dict[str, Any]] | None:
        """Vectors of another site, as far as they are this rank's; None where some did not
        come."""
        into = [np.empty(self._end - self._first, np.float32) for _ in range(count)]
        sources = [Address.from_list(each) for each in ranks]

        def ask(source: Address) -> dict[str, Any]:
            return fetch(source, key, self._spans, into, self.config.patience_s)

        about: dict[str, Any] = {}
        try:
            with ThreadPoolExecutor(_MOST_FETCHES) as threads:
                for each in threads.map(ask, sources):
                    about |= each
        except (OSError, ValueError):
            return None
        return into, about

    def _own(self, vector: Tensor) -> Vector:
        """The numbers of a vector that this rank exchanges. Its replicas exchange the rest."""
        part = vector[self._first : self._end].detach().float().cpu()
        found: Vector = part.numpy()
        return found

    def _spread(self, part: Tensor) -> Tensor:
        """The whole vector, from the parts of all replicas."""
        device = self.fragment.common[0].device
        if self._replicas is None:
            return part.to(device)
        padded = torch.zeros(self._part, device=device)
        padded[: part.numel()].copy_(part)
        whole = padded.new_empty(self._replicas.size() * self._part)
        dist.all_gather_into_tensor(whole, padded, group=self._replicas)
        return whole[: self._length]

    def _digest(self) -> str:
        """A number that two sites share where their common models have the same bits, however many
        ranks they have: each number counts with its place."""
        device = self.fragment.common[0].device
        total, place = torch.zeros((), dtype=torch.int64, device=device), 0
        numbers = self._own(_flat(self.fragment.common))
        for span in self._spans:
            bits = torch.from_numpy(numbers[place : place + span.length].view(np.int32))
            odd = torch.arange(span.start, span.end, dtype=torch.int64) * 2 + 1
            # Sums of 64 bits wrap around, in any order.
            total += (bits.to(torch.int64) * odd).sum().to(device)
            place += span.length
        dist.all_reduce(total, group=self.mesh.world.group)
        return f"{int(total) % 2**64:016x}"

    def _addresses(self) -> list[Any]:
        """Where the ranks of this site listen, and what they hold."""
        mine = Address(self._mailbox.host, self._mailbox.port, self._spans)
        return self.mesh.world.gather(mine.to_list())

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._send(message)
        return self._answer()

    def _send(self, message: Mapping[str, Any]) -> None:
        if self.mesh.world.is_first:
            self._asker.ask(message)

    def _answer(self) -> dict[str, Any]:
        """The council's answer, on all ranks."""
        is_first, asked_at, is_told = self.mesh.world.is_first, time.monotonic(), False
        while True:
            answer = self._asker.answer(_LOOK_EVERY_S) if is_first else None
            if self._asker.fault and not is_told and time.monotonic() - asked_at > _TELL_AFTER_S:
                self._tell_nobody_answers(self._asker.fault)
                is_told = True
            if (answer := self.mesh.world.share(answer)) is not None:
                return answer
            self.beat()

    def _tell_nobody_answers(self, why: str) -> None:
        meet, sites = self.config.meet, self._about["mesh.site"]
        self.say(
            f"ALERT: nobody answers at diloco.meet={meet} ({why}), and this site waits: run "
            f"`shardwise sites {meet} --sites {sites}` there, or stop it and correct diloco.meet"
        )


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([own_part(tensor.detach()).flatten().float() for tensor in tensors])


def _fill(tensors: Sequence[Tensor], vector: Tensor) -> None:
    parts = [own_part(tensor.detach()) for tensor in tensors]
    for part, values in zip(parts, vector.split([p.numel() for p in parts]), strict=True):
        part.copy_(values.view_as(part))
