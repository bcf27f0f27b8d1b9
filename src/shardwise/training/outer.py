"""The outer step of DiLoCo: what sites have learnt apart becomes one model.

Every site trains by itself. After `diloco.steps` steps the difference between the model that all
sites began with and the one that a site has now is its pseudo-gradient. Sites average theirs, and
SGD with Nesterov's momentum moves the common model. Each rank does so for its own shard in fp32.

Fragments of the model have their outer steps at equal distances. An exchange may go on beside inner
steps: what a site has learnt meanwhile is added to the new common model, and counts in the next
pseudo-gradient. At a multiple of `diloco.steps` nothing is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.checkpoint.site_tensors import SiteState
from shardwise.config.schema import DilocoConfig
from shardwise.model.blocks import UnitMap
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.torchao_float8 import own_part
from shardwise.parallel.twins import Twins, UnderWay
from shardwise.training.overlapped import params_of_units


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """An outer step of one fragment, for the record."""

    fragment: int
    sent_bytes: int
    """Bytes that this rank sent to other sites."""

    exchange_s: float
    """From the start of the exchange until this rank had the result."""

    waited_s: float
    """The part of it in which this rank did nothing else."""

    norm: float
    """The norm of the mean pseudo-gradient over the whole fragment."""

    sites: int
    """Sites that took part."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a site is."""

    step: int
    position: int
    """Global batches that it has read."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """After which steps a fragment is sent, and when it joins the common model."""

    steps: int
    fragments: int
    overlap_steps: int

    def joins_after(self, step: int) -> int | None:
        """The fragment whose outer step comes after `step`."""
        distance = self.steps // self.fragments
        return (step // distance - 1) % self.fragments if step % distance == 0 else None

    def is_sent_after(self, step: int) -> int | None:
        """The fragment that is sent after `step`."""
        return self.joins_after(step + self.overlap_steps)

    def is_whole_after(self, step: int) -> bool:
        """Whether all fragments have joined, and nothing is under way."""
        return step % self.steps == 0


class Fragment:
    """Parameters that have their outer step together: this rank's own part of each."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.common = [param.detach().clone() for param in params]
        """What all sites agree on."""

        self.momentum = [torch.zeros_like(param.detach()) for param in params]
        self.learnt: Tensor | None = None
        self.under_way: UnderWay | None = None
        self.started = 0.0

    @torch.no_grad()
    def note_learnt(self) -> Tensor:
        """What this site has learnt since the last outer step, as one vector."""
        self.started = time.perf_counter()
        self.learnt = torch.cat(
            [
                (own_part(common) - own_part(param)).flatten()
                for param, common in zip(self.params, self.common, strict=True)
            ]
        )
        return self.learnt

    def send(self, twins: Twins) -> None:
        """Start to exchange it."""
        self.under_way = twins.send(self.note_learnt())

    @torch.no_grad()
    def join(self, mean: Tensor, lr: float, momentum: float, *, is_waiting: bool) -> None:
        """The outer step with the mean of all sites.

        A site that has trained on since it sent its part keeps what it has learnt meanwhile.
        """
        if self.learnt is None:
            raise RuntimeError("this fragment was not sent")
        sizes = [own_part(param).numel() for param in self.params]
        each = zip(mean.split(sizes), self.learnt.split(sizes), strict=True)
        tensors = zip(self.params, self.common, self.momentum, strict=True)
        for (param, common, buffer), (gradient, learnt) in zip(tensors, each, strict=True):
            now, agreed, speed = own_part(param), own_part(common), own_part(buffer)
            sent = agreed - learnt.view_as(agreed)
            speed.mul_(momentum).add_(gradient.view_as(speed))
            agreed.add_(gradient.view_as(agreed) + momentum * speed, alpha=-lr)
            if is_waiting:
                now.copy_(agreed)
            else:
                now.add_(agreed - sent)
        self.under_way = self.learnt = None

    @torch.no_grad()
    def begin_again(self) -> None:
        """Let the parameters be what all sites agree on."""
        for param, common in zip(self.params, self.common, strict=True):
            own_part(param.detach()).copy_(own_part(common))
        self.under_way = self.learnt = None


class Outer:
    """The common model of all sites, and its outer steps. All ranks call each of these methods
    together."""

    def __init__(
        self, model: nn.Module, parts: Sequence[Sequence[Tensor]], mesh: Mesh, config: DilocoConfig
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.timetable = Timetable(config.steps, config.fragments, config.overlap_steps)
        self.site = mesh.axes.place(mesh.world.rank)["site"]
        self.fragments = [Fragment(params) for params in parts]
        self.beat: Callable[[], None] = lambda: None
        """Called now and then while ranks wait for other sites."""

        names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
        each = [(f, names[p], i) for f in self.fragments for i, p in enumerate(f.params)]
        self.common = {name: fragment.common[i] for fragment, name, i in each}
        self.momentum = {name: fragment.momentum[i] for fragment, name, i in each}

    @property
    def streams(self) -> bool:
        """Whether sites have learnt more than the common model knows when it is whole."""
        return self.config.fragments > 1 or self.config.overlap_steps > 0

    @property
    def state(self) -> SiteState:
        """What a checkpoint keeps of it."""
        sites = self.mesh.axes.site
        return SiteState(self.site, sites, self.common, self.momentum, self.streams)

    def enter(self, reached: Standing, end: int) -> Standing:
        """Meet the other sites before the first step. Returns where this one begins."""
        return reached

    def step(self, reached: Standing) -> Joined | None:
        """What is due after an inner step: a fragment joins, or is sent."""
        raise NotImplementedError

    def where(self, reached: Standing) -> Standing:
        """Where this site is after an outer step, in which it may have been left behind."""
        return reached

    def leave(self, step: int, *, finished: bool) -> None:
        """This site makes no more steps."""

    def norm(self, mean: Tensor) -> float:
        """The norm over all shards of a site."""
        squares = mean.double().square().sum()
        if (group := self.mesh.group("shard")) is not None:
            dist.all_reduce(squares, group=group)
        return float(squares.sqrt())

    def agree(self, position: int, *, wants_stop: bool) -> tuple[int, bool]:
        """The furthest position in the data of all sites, and whether any rank wants to stop."""
        device = self.mesh.devices.device_type
        both = torch.tensor([position, int(wants_stop)], device=device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.mesh.world.group)
        furthest, stops = both.tolist()
        return furthest, bool(stops)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Let parameters be the common model while the block runs."""
        if not self.streams:
            yield
            return
        pairs = [
            (own_part(param.detach()), own_part(common))
            for fragment in self.fragments
            for param, common in zip(fragment.params, fragment.common, strict=True)
        ]
        kept = [now.clone() for now, _ in pairs]
        for now, common in pairs:
            now.copy_(common)
        try:
            yield
        finally:
            for (now, _), own in zip(pairs, kept, strict=True):
                now.copy_(own)


class Together(Outer):
    """Sites in one job, whose twins share a process group. All of them take part."""

    def __init__(self, model: nn.Module, units: UnitMap, mesh: Mesh, config: DilocoConfig) -> None:
        super().__init__(model, _fragments_of(model, units, config.fragments), mesh, config)
        self.twins = Twins.of(mesh, config.exchange)

    def step(self, reached: Standing) -> Joined | None:
        """What is due after an inner step: a fragment joins, or is sent."""
        sending = self.timetable.is_sent_after(reached.step)
        joining = self.timetable.joins_after(reached.step)
        if sending is not None:
            self.fragments[sending].send(self.twins)
        return None if joining is None else self._join(joining)

    def _join(self, number: int) -> Joined:
        fragment, began = self.fragments[number], time.perf_counter()
        if (under_way := fragment.under_way) is None:
            raise RuntimeError("this fragment was not sent")
        waits, mean = self.config.overlap_steps == 0, under_way.mean()
        fragment.join(mean, self.config.lr, self.config.momentum, is_waiting=waits)
        norm = self.norm(mean)
        now = time.perf_counter()
        return Joined(
            fragment=number,
            sent_bytes=under_way.sent_bytes,
            exchange_s=now - fragment.started,
            waited_s=now - (fragment.started if waits else began),
            norm=norm,
            sites=self.mesh.axes.site,
        )


def _fragments_of(model: nn.Module, units: UnitMap, count: int) -> list[list[Tensor]]:
    """Trained parameters in `count` parts: every so many units, so that each part has some of all
    depths."""
    by_unit = params_of_units(model, units.units)
    in_units: set[Tensor] = {param for params in by_unit for param in params}
    rest: list[Tensor] = [p for p in model.parameters() if p.requires_grad and p not in in_units]
    parts = [[p for params in by_unit[first::count] for p in params] for first in range(count)]
    parts[0] = parts[0] + rest
    return parts
