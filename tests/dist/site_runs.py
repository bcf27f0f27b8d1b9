"""Runs of several sites on the ranks of a pool, and what they should give, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tiny_runs import Arrays, Settings, one_batch, plain_adamw, plain_twin, start, whole
from torch import Tensor

from shardwise.checkpoint.restore import find_good, restore_checkpoint
from shardwise.checkpoint.save import Progress, Saver
from shardwise.training.optim import learning_rate
from shardwise.training.outer import Joined, Standing
from shardwise.training.session import Session, build_loader
from shardwise.training.step import Stepper

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class SiteRun:
    """What one rank knows at the end."""

    site: int
    batches: list[Batch]
    """What this rank read in every step."""

    joined: list[Joined]
    common: Arrays
    own: Arrays
    momentum: Arrays


def train_sites(
    world: int, settings: Settings, *, root: Path | None = None, save_at: int = 0
) -> SiteRun:
    """All steps, and outer steps where they are due. With `root` the run begins from the
    checkpoint there, or is saved there after `save_at` steps."""
    session = start(world, settings)
    steps, first, joined, batches = session.plan.config.train.steps, 0, [], []
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    loader = build_loader(session)
    if root is not None and not save_at:
        first = _restore(session, root)
    for step in range(first, steps):
        read = loader.step_batches(step)
        batches.append(one_batch(read))
        stepper.run(read, learning_rate(session.plan.config.optim, step, steps))
        if (
            session.outer is not None
            and (found := session.outer.step(Standing(step + 1, step + 1))) is not None
        ):
            joined.append(found)
        if root is not None and step + 1 == save_at:
            _save(session, root, save_at)
    return _described(session, batches, joined)


def _described(session: Session, batches: list[Batch], joined: list[Joined]) -> SiteRun:
    own = {name: _array(param) for name, param in session.model.named_parameters()}
    outer = session.outer
    if outer is None:
        return SiteRun(0, batches, joined, own, own, {})
    common = {name: _array(tensor) for name, tensor in outer.common.items()}
    momentum = {name: _array(tensor) for name, tensor in outer.momentum.items()}
    joined = [replace(each, exchange_s=0.0, waited_s=0.0) for each in joined]
    return SiteRun(outer.site, batches, joined, common, own, momentum)


def _array(tensor: Tensor) -> Any:
    return whole(tensor).numpy().copy()


def _save(session: Session, root: Path, step: int) -> None:
    sites = None if session.outer is None else session.outer.state
    parts = (session.plan, session.model, session.optimizer, session.mesh.world)
    saver = Saver(root, *parts, sites=sites)
    progress = Progress(step=step, position=step, tokens=0, loss=None, loss_scale=None)
    saver.start(progress)
    [outcome] = saver.finish()
    saver.close()
    assert outcome.error is None


def _restore(session: Session, root: Path) -> int:
    world = session.mesh.world
    found = find_good(root, world, verify=True, tell=lambda path, reasons: None)
    assert found is not None
    sites = None if session.outer is None else session.outer.state
    restore_checkpoint(found, session.plan, session.model, session.optimizer, world, sites)
    return found.step


class PlainSite:
    """One site as a single process: AdamW on its own part of every batch."""

    def __init__(self, settings: Settings) -> None:
        self.session = start(1, {**settings, "mesh.site": 1})
        self.model = plain_twin(self.session)
        self.optimizer = plain_adamw(self.model, self.session.plan.config.optim)

    def step(self, step: int, batch: Batch) -> None:
        """One update."""
        config = self.session.plan.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, config.train.steps)
        inputs, labels = batch
        logits = self.model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        assert config.optim.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.clip_norm)
        self.optimizer.step()


def train_plainly_apart(
    settings: Settings, parts: Sequence[Sequence[Batch]], *, every: int, lr: float, momentum: float
) -> Arrays:
    """DiLoCo in a world of one: sites one after the other, and torch's own SGD joins them."""
    usual = {name: each for name, each in settings.items() if not name.startswith("diloco.")}
    sites = [PlainSite(usual) for _ in parts]
    common = PlainSite(usual).model
    outer = torch.optim.SGD(common.parameters(), lr=lr, momentum=momentum, nesterov=True)
    for step in range(len(parts[0])):
        for site, batches in zip(sites, parts, strict=True):
            site.step(step, batches[step])
        if (step + 1) % every:
            continue
        with torch.no_grad():
            for param, *theirs in zip(
                common.parameters(), *(site.model.parameters() for site in sites), strict=True
            ):
                param.grad = torch.stack([param - other for other in theirs]).mean(0)
            outer.step()
            for site in sites:
                site.model.load_state_dict(common.state_dict())
    return {name: param.detach().numpy().copy() for name, param in common.named_parameters()}
