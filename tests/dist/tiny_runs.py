"""Tiny fp32 runs: by shardwise on the ranks of a pool, and by plain PyTorch in one process."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config.plain import config_from_dict
from shardwise.config.rules import validate_rules
from shardwise.config.schema import OptimConfig
from shardwise.data.loader import MicroBatch
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.kernels.packed_rows import floats_of
from shardwise.launch.prepare import choose_plan
from shardwise.model.boxes import whole_box
from shardwise.model.packed import as_rows, packing_of
from shardwise.model.stage_part import is_staged
from shardwise.model.weights import Portion, portions_of
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.torchao_float8 import bare
from shardwise.plan.decisions import Choice
from shardwise.plan.planned import Plan
from shardwise.training.document_attention import masks_by_position
from shardwise.training.optim import learning_rate
from shardwise.training.session import (
    Session,
    attach_training_loss,
    build_loader,
    build_session,
)
from shardwise.training.step import Stepper
from shardwise.training.surroundings import fast_attention

Settings = Mapping[str, Any]
Arrays = dict[str, NDArray[Any]]
StepBatches = Callable[[int], list[MicroBatch]]

TOLERANCE = 1e-5
# A step costs a tenth of a second on every rank.
STEPS = 5 if "SHARDWISE_FULL_GRID" in os.environ else 3
# 301 rows and 66 columns divide over neither 2 nor 4 ranks, so shards are uneven and padded.
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 66,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
}
DEFAULTS: Settings = {
    "model.overrides": SHAPE,
    "data.source": "synthetic",
    "data.seq_len": 16,
    "train.global_batch": 16,
    "train.steps": STEPS,
    "precision.param": "fp32",
    "optim.lr": 1e-3,
    "optim.warmup_steps": 2,
    # Adam divides a gradient by its size: where that is almost nothing, rounding would show.
    "optim.eps": 1e-6,
}


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run gave: loss and gradient norm of each step, and its last parameters, whole."""

    losses: list[float]
    norms: list[float]
    params: Arrays


@dataclass(slots=True)
class Tally:
    """How many runs were compared with one process, and the largest differences."""

    count: int = 0
    loss: float = 0.0
    params: float = 0.0

    def add(self, loss: float, params: float) -> None:
        """One more comparison."""
        self.count += 1
        self.loss, self.params = max(self.loss, loss), max(self.params, params)

    def __str__(self) -> str:
        return (
            f"equivalence: {self.count} runs compared with one process; worst relative "
            f"difference of a loss {self.loss:.1e}, of a parameter {self.params:.1e}"
        )


def tiny_plan(world: int, settings: Settings) -> Plan:
    """The plan for `DEFAULTS` with dotted `settings` laid over them, on CPU ranks."""
    sections: dict[str, Any] = defaultdict(dict)
    for path, value in {**DEFAULTS, "cluster.name": f"{world}xCPU", **settings}.items():
        section, _, name = path.rpartition(".")
        (sections[section] if section else sections)[name] = value
    config = config_from_dict(dict(sections))
    validate_rules(config)
    return on_cpu(choose_plan(config, environ={}))


def on_cpu(plan: Plan) -> Plan:
    """A plan for GPUs, which float8 needs, for ranks on CPU; compiled only where that was asked."""
    if plan.cluster.device == "cpu":
        return plan
    here = replace(plan, cluster=replace(plan.cluster, device="cpu"))
    eager = Choice(False, "compiling takes longer than it saves", "rule")
    return here if plan.choices["compile"].source == "user" else here.with_choices(compile=eager)


def train(world: int, settings: Settings) -> Trained | None:
    """On every rank: all steps; the result comes from rank 0."""
    session = start(world, settings)
    return run_steps(session, range(session.plan.config.train.steps))


def start(world: int, settings: Settings) -> Session:
    """A session on this rank."""
    plan = tiny_plan(world, settings)
    session = build_session(plan, build_mesh(plan), lambda text: None)
    if session.plan.weights_dir is None:
        _move_biases(session.model)
    attach_training_loss(session, lambda text: None)
    return session


def _move_biases(model: torch.nn.Module) -> None:
    """A key's bias has almost no gradient: from zero, rounding would be all there is of it."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.fill_(0.05)


def run_steps(session: Session, steps: range, batches_of: StepBatches | None = None) -> Any:
    """Run `steps`; what they gave is returned on rank 0."""
    plan = session.plan
    stepper = Stepper(session.model, session.optimizer, plan, session.mesh)
    batches_of = batches_of or build_loader(session).step_batches
    losses, norms = [], []
    with fast_attention(session.device, reads_positions=masks_by_position(plan)):
        for step in steps:
            rate = learning_rate(plan.config.optim, step, plan.config.train.steps)
            result = stepper.run(batches_of(step), rate)
            losses.append((result.loss_sum.double() / result.num_tokens).item())
            norms.append(result.grad_norm)
    stepper.settle()
    return on_first(Trained(losses, norms, whole_params(session.model)))


def whole_params(model: torch.nn.Module) -> Arrays:
    """Every parameter by name, gathered from its shards, and from all stages of a pipeline."""
    params = dict(model.named_parameters())
    if isinstance(model, torch.nn.Module):
        found = wholes(portions_of(model, params), in_stages=is_staged(model))
    else:  # what stands for a model that is neither cut nor staged
        found = {name: whole(param) for name, param in params.items()}
    return {name: _as_array(each) for name, each in found.items()}


def _as_array(tensor: Tensor) -> NDArray[Any]:
    """Floats in fp32, and the words of packed rows as they are."""
    array: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).numpy().copy()
    return array


def wholes(portions: Mapping[str, Portion], *, in_stages: bool) -> dict[str, Tensor]:
    """Tensors of a model in one piece each, from the ranks along all axes. All ranks call this
    together, those of one stage for the same names. What several ranks hold, they hold alike."""
    mine = {name: (each.cut, whole(each.tensor)) for name, each in portions.items()}
    if not in_stages and not any(each.cut for each in portions.values()):
        return {name: part for name, (_, part) in mine.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for name, (cut, part) in (pair for each in everyone for pair in each.items()):
        shape = part.shape if cut is None else cut.shape
        into = found.setdefault(name, torch.empty(shape, dtype=part.dtype))
        known = filled.setdefault(name, torch.zeros(shape, dtype=torch.bool))
        box = whole_box(part.shape)
        for place, inside in [(box, box)] if cut is None else cut.places(box):
            before, now = into[place.slices], part[inside.slices]
            assert torch.equal(before[known[place.slices]], now[known[place.slices]]), name
            before.copy_(now)
            known[place.slices] = True
    assert all(map(torch.Tensor.all, filled.values()))
    return found


def whole(tensor: Tensor) -> Tensor:
    """What FSDP2 has sharded of a tensor, in one piece. All ranks call this together."""
    tensor = bare(tensor.detach())
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_first(value: Any) -> Any:
    """`value` on rank 0 only: the other ranks hold the same."""
    return value if dist.get_rank() == 0 else None


# ---- the reference: one process without FSDP -------------------------------------------------


def train_plainly(settings: Settings, mask: Callable[[Tensor], Tensor] | None = None) -> Trained:
    """In a world of one: the same model, data and schedule in a dozen lines of plain PyTorch.

    `mask` changes the labels of every global batch.
    """
    session = start(1, settings)
    loader = build_loader(session)
    batches = []
    for step in range(session.plan.config.train.steps):
        inputs, labels = one_batch(loader.step_batches(step))
        batches.append((inputs, mask(labels) if mask else labels))
    return train_batches(plain_twin(session), session.plan, batches)


def plain_twin(session: Session, without: Collection[str] = ()) -> Any:
    """A Hugging Face model, unsharded, with the weights of a session, but for those `without`."""
    config = AutoConfig.for_model(**session.plan.hf_config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    named = session.model.named_parameters()
    weights = {name: _as_floats(param) for name, param in named if name not in without}
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights.pop(name))
    buffers = dict(session.model.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers.pop(name)), f"buffer {name} is not the family's own"
    assert not weights and not buffers
    return model


def _as_floats(param: Tensor) -> Tensor:
    """A whole parameter, made floats where it is packed."""
    packing = packing_of(param)
    if packing is None:
        return whole(param)
    return as_rows(floats_of(whole(param), torch.float32), packing)


class Apart:
    """A model to which every document is a batch of its own."""

    def __init__(self, model: Any, end: int) -> None:
        self.model, self.end = model, end
        self.parameters, self.named_parameters = model.parameters, model.named_parameters
        self.named_modules = model.named_modules

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        rows = []
        for row in input_ids:
            ends = [int(at) + 1 for at in (row[:-1] == self.end).nonzero()]
            documents = torch.tensor_split(row, ends)
            rows.append(torch.cat([self.model(input_ids=d[None]).logits[0] for d in documents]))
        return SimpleNamespace(logits=torch.stack(rows))


def train_documents_apart(settings: Settings) -> Trained:
    """As `train_plainly`, with no document in one batch with another."""
    session = start(1, settings)
    loader = build_loader(session)
    steps = range(session.plan.config.train.steps)
    batches = [one_batch(loader.step_batches(step)) for step in steps]
    end = ByteTokenizer.eos_id
    assert min(int((ids == end).sum()) for ids, _ in batches) >= len(steps)
    return train_batches(Apart(plain_twin(session), end), session.plan, batches)


def one_batch(batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
    """Inputs and labels of several micro-batches in one."""
    return (
        torch.cat([batch.inputs for batch in batches]),
        torch.cat([batch.labels for batch in batches]),
    )


def plain_adamw(model: Any, optim: OptimConfig) -> torch.optim.AdamW:
    """Weight decay for matrices, and none for vectors."""
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=optim.betas,
        eps=optim.eps,
    )


def train_batches(model: Any, plan: Plan, batches: Sequence[tuple[Tensor, Tensor]]) -> Trained:
    """One whole batch a step: cross-entropy of the logits, clip, AdamW."""
    optim = plan.config.optim
    params = list(model.parameters())
    optimizer = plain_adamw(model, optim)
    losses, norms = [], []
    limit = float("inf") if optim.clip_norm is None else optim.clip_norm
    for step, (inputs, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, plan.config.train.steps)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, limit).item())
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, norms, whole_params(model))


# ---- comparing -------------------------------------------------------------------------------


def assert_close(run: Trained, reference: Trained, tally: Tally) -> None:
    """Losses, gradient norms and parameters agree to `TOLERANCE`."""
    loss, params = differences(run, reference)
    tally.add(loss, params)
    assert loss <= TOLERANCE
    assert params <= TOLERANCE


def differences(run: Trained, reference: Trained) -> tuple[float, float]:
    """The largest relative difference of a loss or gradient norm, and of a parameter."""
    assert run.params.keys() == reference.params.keys()
    pairs = zip(run.losses + run.norms, reference.losses + reference.norms, strict=True)
    loss = max(abs(a - b) / abs(b) for a, b in pairs)
    params = max(
        float(np.linalg.norm(run.params[name] - value) / np.linalg.norm(value))
        for name, value in reference.params.items()
    )
    return loss, params


def assert_same(run: Trained, reference: Trained) -> None:
    """To the last bit."""
    assert run.losses == reference.losses
    assert run.norms == reference.norms
    assert run.params.keys() == reference.params.keys()
    for name, value in reference.params.items():
        assert np.array_equal(run.params[name], value), name
