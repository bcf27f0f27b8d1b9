"""The gradients of one step: by shardwise on several ranks, and by plain PyTorch in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from rank_pool import Ranks
from tiny_families import tiny_config
from tiny_runs import (
    TOLERANCE,
    Arrays,
    Settings,
    on_first,
    one_batch,
    plain_twin,
    start,
    wholes,
)
from transformers import PreTrainedConfig

from shardwise.model.stage_part import is_staged
from shardwise.model.weights import portions_of
from shardwise.training.session import build_loader
from shardwise.training.step import Stepper


def assert_gradients(
    ranks: Callable[[int], Ranks],
    family: str,
    mesh: tuple[int, Settings],
    home: Path,
    change: Callable[[PreTrainedConfig], None] = lambda config: None,
) -> None:
    """Each gradient of a family on a mesh of so many ranks is that of one process."""
    world, axes = mesh
    config = tiny_config(family)
    change(config)
    (home / "config.json").write_text(json.dumps(config.to_dict()))
    settings = {
        **{"model.name": str(home), "model.overrides": {}, "model.attention": "eager"},
        **{"train.router_aux_loss": "off", "data.seq_len": 32, "train.global_batch": 8},
    }
    plain: Arrays = ranks(1).run(plain_gradients, settings)[0]
    found: Arrays = ranks(world).run(gradients, world, {**settings, **axes})[0]
    assert found.keys() == plain.keys() and len(found) > 15
    apart = {
        name: float(np.linalg.norm(found[name] - each) / max(1e-6, np.linalg.norm(each)))
        for name, each in plain.items()
    }
    worst = max(apart, key=apart.__getitem__)
    print(f"\n{family} {axes}: {len(apart)} gradients, worst {apart[worst]:.1e} ({worst})")
    assert apart[worst] <= TOLERANCE, worst


def gradients(world: int, settings: Settings) -> Any:
    """On every rank: the gradients of the first step, each in one piece."""
    session = start(world, settings)
    stepper = Stepper(session.model, session.optimizer, session.plan, session.mesh)
    batches = build_loader(session).step_batches(0)
    _, num_terms, _ = stepper._agree(batches, False)
    stepper._accumulate(batches, num_terms)
    grads = {n: p.grad for n, p in session.model.named_parameters() if p.requires_grad}
    found = wholes(portions_of(session.model, grads), in_stages=is_staged(session.model))
    return on_first({name: grad.numpy() for name, grad in found.items()})


def plain_gradients(settings: Settings) -> Arrays:
    """In one process: those of the same batch through plain PyTorch."""
    session = start(1, settings)
    model = plain_twin(session)
    inputs, labels = one_batch(build_loader(session).step_batches(0))
    logits = model(input_ids=inputs, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return {name: param.grad.numpy() for name, param in model.named_parameters()}
