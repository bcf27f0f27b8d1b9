"""One family, trained twice on the same tokens: by shardwise on several ranks, and plainly."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_pool import Ranks
from tiny_families import VOCAB, save_model, tiny_config
from tiny_runs import plain_adamw, tiny_plan
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from shardwise.checkpoint.export_model import export_checkpoint
from shardwise.checkpoint.exporter import Exporter
from shardwise.checkpoint.read import find_checkpoint, verify_checkpoint
from shardwise.checkpoint.save import Progress, Saver
from shardwise.parallel.mesh import build_mesh
from shardwise.plan.planned import Plan
from shardwise.training.optim import learning_rate
from shardwise.training.session import attach_training_loss, build_loader, build_session
from shardwise.training.step import Stepper

Batch = tuple[Tensor, Tensor]
STEPS = 5 if "SHARDWISE_CHAOS" in os.environ else 3
ROUTER_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
# Families whose load-balancing loss is not transformers' usual one: asking for it is refused.
OWN_ROUTER_LOSSES = ("doge",)
LOSS_TOLERANCE = 1e-5
# Adam's first steps are as large for a gradient near nothing, whose rounding is large beside it.
WEIGHT_TOLERANCE = 5e-5
SETTINGS: dict[str, Any] = {
    "model.overrides": {},
    "data.seq_len": 16,
    "train.global_batch": 4,
    "train.steps": STEPS,
    "shard.strategy": "full_shard",
    # Adam divides a gradient by its size: one that is nothing but rounding must not become a step.
    "optim.eps": 1e-4,
}


@dataclass(frozen=True, slots=True)
class Compared:
    """How near two runs of a family came to each other."""

    family: str
    plain: float
    ours: float
    loss: float
    """The largest relative difference of a loss."""

    weights: float
    """The largest difference of a tensor that was exported, relative to its size."""

    @property
    def is_equal(self) -> bool:
        """To rounding."""
        return self.loss <= LOSS_TOLERANCE and self.weights <= WEIGHT_TOLERANCE

    def row(self) -> str:
        """A line of the table."""
        equal = "equal" if self.weights <= WEIGHT_TOLERANCE else "DIFFERS"
        return (
            f"{self.family:26} {self.plain:10.6f} {self.ours:10.6f} {self.loss:10.1e} "
            f"{self.weights:10.1e}  {equal}"
        )


HEADER = f"{'family':26} {'plain':>10} {'ours':>10} {'loss diff':>10} {'export':>10}"


def compare(
    ranks: Ranks,
    family: str,
    home: Path,
    settings: Mapping[str, Any] | None = None,
    change: Callable[[PreTrainedConfig], None] | None = None,
) -> Compared:
    """Make the family, train it in both ways, export it, and measure the differences.

    A mixture's config asks for its router's auxiliary loss, unless another `change` is wanted.
    """
    source, run, out = home / "source", home / "run", home / "out"
    config = tiny_config(family)
    (change or ask_for_router_loss)(config)
    save_model(config, source)
    wanted = {**SETTINGS, "model.name": str(source), **(settings or {})}
    results = ranks.run(train_ours, wanted, run / "checkpoints")
    losses, _, buffers = results[0]
    batches = [_together([rank[1][step] for rank in results]) for step in range(STEPS)]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), f"buffer {name} is not the family's own"
    plain = train_plainly(model, tiny_plan(ranks.world, wanted), batches)
    checkpoint = verify_checkpoint(find_checkpoint(run))
    exporter = Exporter(checkpoint, None, lambda num_bytes: None)
    export_checkpoint(exporter, out, layout="safetensors", max_shard_size="1GB")
    # Both from files: transformers makes the padding's row zero when it loads some families.
    model.save_pretrained(home / "plain")
    exported, expected = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).state_dict()
        for place in (out, home / "plain")
    )
    return Compared(
        family,
        plain[-1],
        losses[-1],
        max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True)),
        _largest_difference(exported, expected),
    )


def ask_for_router_loss(config: PreTrainedConfig) -> None:
    """Let a mixture's forward compute it, with a weight that would show where it were left out."""
    text = config.get_text_config()
    if config.model_type in OWN_ROUTER_LOSSES:
        return
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = True
    for name in ROUTER_COEFFICIENTS:
        if hasattr(text, name):
            setattr(text, name, 0.1)


def router_coefficient(model: Any) -> float:
    """What the family's forward multiplies its router's loss with."""
    holders = ((holder, name) for holder in (model, model.config) for name in ROUTER_COEFFICIENTS)
    return next(float(getattr(*place)) for place in holders if hasattr(*place))


def train_ours(
    settings: Mapping[str, Any], root: Path
) -> tuple[list[float], list[Batch], dict[str, Tensor]]:
    """On every rank: five steps and a checkpoint.

    Returns losses, this rank's tokens, and the buffers before the first step.
    """
    wanted = tiny_plan(dist.get_world_size(), settings)
    session = build_session(wanted, build_mesh(wanted), lambda text: None)
    plan, model = session.plan, session.model
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    attach_training_loss(session, lambda text: None)
    stepper, loader = Stepper(model, session.optimizer, plan, session.mesh), build_loader(session)
    losses, tokens = [], []
    for step in range(STEPS):
        batches = loader.step_batches(step)
        rate = learning_rate(plan.config.optim, step, STEPS)
        result = stepper.run(batches, rate)
        losses.append((result.loss_sum.double() / result.num_tokens).item())
        tokens.append(_together([(batch.inputs, batch.labels) for batch in batches]))
    _assert_buffers_agree(before, dict(model.named_buffers()))
    saver = Saver(root, plan, model, session.optimizer, session.mesh.world)
    saver.start(Progress(step=STEPS, position=STEPS, tokens=0, loss=None, loss_scale=None))
    (outcome,) = saver.finish()
    saver.close()
    assert outcome.error is None
    return losses, tokens, before


def train_plainly(model: Any, plan: Plan, batches: list[Batch]) -> list[float]:
    """A dozen lines of plain PyTorch: one process, the whole batch, sum over valid tokens."""
    optim = plan.config.optim
    params = list(model.parameters())
    optimizer = plain_adamw(model, optim)
    losses = []
    for step, (inputs, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, STEPS)
        output = model(input_ids=inputs, use_cache=False)
        loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        losses.append(loss.item())
        if getattr(output, "aux_loss", None) is not None:
            loss = loss + router_coefficient(model) * output.aux_loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, optim.clip_norm or float("inf"))
        optimizer.step()
    return losses


def _together(parts: list[Batch]) -> Batch:
    inputs, labels = (torch.cat(side) for side in zip(*parts, strict=True))
    assert int(inputs.max()) < VOCAB
    return inputs, labels


def _largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    pairs = ((found[name].double(), value.double()) for name, value in expected.items())
    return max(float((a - b).norm() / b.norm().clamp(min=1e-2)) for a, b in pairs)


def _assert_buffers_agree(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """A buffer that training changes must change alike on all ranks."""
    for name, buffer in after.items():
        if not torch.equal(before[name], buffer):
            first = buffer.clone()
            dist.broadcast(first, src=0)
            assert torch.equal(first, buffer), f"buffer {name} differs between ranks"
