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

from shardwise.model.lora import adapted_layers
from shardwise.model.weights import copy_shard
from shardwise.training.session import Session, build_loader


def start_moved(world: int, settings: Settings) -> Session:
    """A session whose B is not zero, so that A has gradients from the first step on."""
    session = start(world, settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in adapted_layers(session.model).values():
            shape = layer.lora_B.shape
            copy_shard(layer.lora_B, 0.1 * torch.randn(shape, generator=generator))
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
    """A linear layer and its adapter, as two modules."""

    def __init__(self, layer: nn.Module, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.lora_A, self.lora_B = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + self.scale * (x @ self.lora_A.t() @ self.lora_B.t())


class _Adapters:
    """A model of which only the adapters are parameters."""

    def __init__(self, model: nn.Module, layers: dict[str, PlainLora]) -> None:
        self.model, self.layers = model, layers

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def named_parameters(self) -> Any:
        for name, layer in self.layers.items():
            yield f"{name}.lora_A", layer.lora_A
            yield f"{name}.lora_B", layer.lora_B

    def parameters(self) -> list[nn.Parameter]:
        return [param for _, param in self.named_parameters()]


def train_adapted_plainly(settings: Settings) -> Trained:
    """In a world of one: a Hugging Face model with adapters around its layers."""
    session = start_moved(1, settings)
    loader = build_loader(session)
    adapted = adapted_layers(session.model)
    names = {f"{name}.{part}" for name in adapted for part in ("lora_A", "lora_B")}
    base = plain_twin(session, without=names).requires_grad_(False)
    layers = {}
    for name, layer in adapted.items():
        parent, _, last = name.rpartition(".")
        own = base.get_submodule(name)
        a, b = whole(layer.lora_A), whole(layer.lora_B)
        layers[name] = PlainLora(own, a, b, layer.lora_scale)
        setattr(base.get_submodule(parent), last, layers[name])
    steps = range(session.plan.config.train.steps)
    batches = [one_batch(loader.step_batches(step)) for step in steps]
    frozen = {
        name: value for name, value in whole_params(session.model).items() if name not in names
    }
    trained = train_batches(_Adapters(base, layers), session.plan, batches)
    return Trained(trained.losses, trained.norms, {**trained.params, **frozen})
