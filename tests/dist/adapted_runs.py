"""Tiny runs with adapters: by shardwise on ranks, and by plain PyTorch in one process."""

from __future__ import annotations

from typing import Any

import torch
from tiny_runs import (
    Settings,
    Trained,
    one_batch,
    plain_twin,
    run_steps,
    start,
    train_batches,
    whole,
    whole_params,
)
from torch import Tensor, nn
from torch.func import functional_call

from shardwise.model.lora import adapter_params, adapters_of
from shardwise.model.lora import whole_params as trained_whole
from shardwise.model.weights import portions_of
from shardwise.training.session import Session, build_loader


def start_moved(world: int, settings: Settings) -> Session:
    """A session whose B is not zero, so that A has gradients from the first step on."""
    session = start(world, settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        kept = portions_of(session.model, dict(session.model.named_parameters()))
        for each in adapters_of(session.model).values():
            b = kept[each.b]
            b.fill(0.1 * torch.randn(b.shape, generator=generator))
    return session


def train_adapted(world: int, settings: Settings) -> Any:
    """On every rank: all steps; the result comes from rank 0."""
    session = start_moved(world, settings)
    frozen = [p for p in session.model.parameters() if not p.requires_grad]
    before = [whole(param).clone() for param in frozen]
    trained = run_steps(session, range(session.plan.config.train.steps))
    assert frozen and all(param.grad is None for param in frozen)
    assert all(map(torch.equal, before, map(whole, frozen)))
    assert {p.dtype for p in session.model.parameters() if p.requires_grad} == {torch.float32}
    return trained


class PlainLora(nn.Module):
    """A module whose weights are summed with the products of A and B, then used as they are."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.added: dict[str, Any] = {}

    def forward(self, *inputs: Tensor) -> Tensor:
        weights = {}
        for name, (a, b, scale, lengths) in self.added.items():
            weight, delta = self.module.get_parameter(name), scale * (b @ a)
            # gpt-oss has its experts as (in, out).
            total = weight + (delta if delta.shape == weight.shape else delta.mT)
            if lengths is not None:
                total = (lengths / total.detach().norm(dim=1))[:, None] * total
            weights[name] = total
        y: Tensor = functional_call(self.module, weights, inputs)
        return y


class _Adapters:
    """A model of which only the adapters are parameters."""

    def __init__(self, model: nn.Module, params: dict[str, nn.Parameter]) -> None:
        self.model, self.params = model, params

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def named_parameters(self) -> Any:
        yield from self.params.items()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.params.values())


def train_adapted_plainly(settings: Settings) -> Trained:
    """In a world of one: a Hugging Face model with adapters around its modules."""
    session = start_moved(1, settings)
    loader = build_loader(session)
    added = adapter_params(session.model)
    base = plain_twin(session, without=added).requires_grad_(False)
    params = {name: nn.Parameter(whole(param).clone()) for name, param in added.items()}
    wrapped: dict[str, PlainLora] = {}
    for weight, each in adapters_of(session.model).items():
        path, _, stack = weight.rpartition(".")
        if path not in wrapped:
            wrapped[path] = PlainLora(base.get_submodule(path))
        lengths = None if each.magnitude is None else params[each.magnitude]
        wrapped[path].added[stack] = (params[each.a], params[each.b], each.scale, lengths)
    for path, module in wrapped.items():
        parent, _, last = path.rpartition(".")
        setattr(base.get_submodule(parent), last, module)
    steps = range(session.plan.config.train.steps)
    batches = [one_batch(loader.step_batches(step)) for step in steps]
    for name in trained_whole(session.model):
        params[name] = base.get_parameter(name).requires_grad_()
    frozen = {n: value for n, value in whole_params(session.model).items() if n not in params}
    trained = train_batches(_Adapters(base, params), session.plan, batches)
    return Trained(trained.losses, trained.norms, {**trained.params, **frozen})
