"""Rank 0 as the real code builds it, with emulated collectives and synthetic data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

from shardwise.data.loader import BatchLoader
from shardwise.data.splits import DataSplits, build_sequences
from shardwise.errors import UserError
from shardwise.model.blocks import UnitMap
from shardwise.parallel.axis_groups import AxisGroups
from shardwise.parallel.mesh import Mesh, build_mesh
from shardwise.parallel.torchao_float8 import float8_layers
from shardwise.plan.decisions import Choice
from shardwise.plan.planned import Plan
from shardwise.training.lion import build_lion
from shardwise.training.loss import attach_loss
from shardwise.training.model_lines import float8_table, notes_of
from shardwise.training.optim import build_optimizer
from shardwise.training.session import (
    Say,
    Session,
    attach_training_loss,
    build_loader,
    fill_model,
    shard_model,
)
from shardwise.training.step import Stepper
from shardwise.tunnel.emulate import Emulator


@dataclass(frozen=True, slots=True)
class Shell:
    """A sharded model that is still on meta."""

    plan: Plan
    model: Any
    units: UnitMap
    mesh: Mesh


@dataclass(frozen=True, slots=True)
class Rank:
    """Everything that rank 0 needs to make steps."""

    session: Session
    stepper: Stepper
    loader: BatchLoader

    @property
    def params(self) -> list[Tensor]:
        """The shards of the parameters."""
        return list(self.session.model.parameters())

    @property
    def grads(self) -> list[Tensor]:
        """The shards of the gradients, where there are any."""
        return [param.grad for param in self.params if param.grad is not None]

    @property
    def optimizer_state(self) -> list[Tensor]:
        """Adam's moments and step counts."""
        states: list[dict[str, Any]] = list(self.session.optimizer.state.values())
        return [value for state in states for value in state.values() if torch.is_tensor(value)]


def plan_on(plan: Plan, device: Literal["cuda", "cpu"], *, compiled: bool) -> Plan:
    """The same plan on this machine's device, with random weights, because no figure depends on
    them.

    A plan without torch.compile stays without it.
    """
    here = replace(plan, cluster=replace(plan.cluster, device=device), weights_dir=None)
    if device == "cpu" and (why := _why_other_attention(plan)):
        # Our operator saves the same tensors as the kernels of a GPU.
        here = here.with_choices(attention=Choice("flash_attention_4", why, "rule"))
    if plan.decided.compile and not compiled:
        return here.with_choices(compile=Choice(False, "the tunnel compiles on GPUs only", "rule"))
    return here


def _why_other_attention(plan: Plan) -> str | None:
    """Why a CPU cannot stand for a GPU with the plan's attention; None where it can."""
    decided, widths = plan.decided, [e for kind in plan.model.kinds for e in kind.work.attentions]
    if decided.attention == "flex_attention":
        return "FlexAttention has no backward on a CPU"
    if decided.attention != "sdpa" or plan.cluster.device == "cpu":
        return None
    if decided.context > 1:
        return "on a CPU sdpa has no fast kernel for more keys than queries"
    if any(each.key_width != each.value_width for each in widths):
        return "on a CPU sdpa has no fast kernel for values of another width than keys"
    return None


def shard_rank(plan: Plan, emulator: Emulator) -> Shell:
    """The model of the plan, its collectives replaced."""
    mesh = build_mesh(plan)
    emulator.traffic.groups = AxisGroups.of(mesh)
    model, units = shard_model(plan, mesh, emulator)
    return Shell(plan, model, units, mesh)


def fill_rank(shell: Shell, say: Say, *, has_values: bool) -> Rank:
    """Give a shell storage, an optimizer, a loss and data.

    Whether the loss may be chunked is tried on the weights; without values the plan is trusted.
    So it is where experts are dealt out: which expert computes a token depends here on all tokens,
    because each rank receives its own rows, and no trial of a few tokens would hold.
    """
    plan, model = shell.plan, shell.model
    if plan.settings.optim.gathers_matrices:
        raise UserError(
            f"the tunnel runs no optim.name={plan.decided.optimizer}",
            why="it gathers matrices in the update, which is not emulated",
            fix="write optim.name=adamw for the tunnel; forward and backward are the same",
        )
    if layers := float8_layers(model, shell.units, plan):
        say("; ".join(line.strip() for line in float8_table(layers, plan)))
        if plan.cluster.device == "cpu":
            say(
                "float8 is emulated in fp32 here, which takes time and memory that GPUs do not need"
            )
    if plan.settings.data.keeps_documents_apart:
        say("no documents are kept apart here: random tokens have none")
    if plan.settings.preference.objective != "none":
        say("the loss here is that of the next token; comparing answers computes logits once more")
    for note in notes_of(shell.units, plan, shell.mesh.world):
        say(note)
    fill_model(model, shell.units, plan, say, with_weights=has_values)
    build = build_lion if plan.decided.optimizer == "lion" else build_optimizer
    optimizer: torch.optim.Optimizer = build(model, plan)
    device = torch.device(plan.cluster.device)
    data = _synthetic_data(plan)
    session = Session(plan, model, shell.units, optimizer, data, device, shell.mesh)
    if has_values and plan.decided.expert == 1:
        attach_training_loss(session, say)
    else:
        attach_loss(model, chunked=plan.decided.loss == "chunked")
        register_fsdp_forward_method(model, "sum_loss")
    return Rank(session, Stepper(model, optimizer, plan, shell.mesh), build_loader(session))


def _synthetic_data(plan: Plan) -> DataSplits:
    settings = plan.settings
    return build_sequences(
        replace(settings.data, source="synthetic", mixture={}, eval_fraction=0.0, eval_path=None),
        # Rank 0 has the first rows of a divided vocabulary. Tokens of other ranks would be zeros
        # here, and the gradient of a norm of zeros grows at every norm, to infinity in 80 blocks.
        vocab_size=plan.model.vocab_size // plan.decided.tensor,
        model_name=settings.model.name,
        seed=settings.train.seed,
        cache_root=Path(settings.runs_dir),
    )
