"""Expert parallel: each rank of the axis `expert` keeps some of the experts of every block.

Ranks of that axis hold different tokens, and exchange them (`dispatch.py`). FSDP2 shards what a
rank keeps over the ranks that keep the same experts, and over those alone its gradient is summed:
the tokens of all others have come to it already.

Experts that every token goes through stay on every rank. They compute while tokens travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.kernels.own import uses_own
from shardwise.model.cuts import Cut, cut_parameter
from shardwise.model.expert_forms import CLAMPED_SWIGLU, SWIGLU, ExpertForm, find_form
from shardwise.model.expert_lora import ExpertLora, take_over
from shardwise.model.expert_modules import ExpertStack, find_experts
from shardwise.model.override import override_forward
from shardwise.model.shared_experts import SharedExperts, take_apart
from shardwise.parallel.dispatch import AllToAll, Dispatch
from shardwise.parallel.received_rows import ReceivedRows
from shardwise.plan.decisions import multiplies_experts
from shardwise.plan.planned import Plan

# (a module, rows, their shares, their experts, where experts end) -> what is made of the rows
_Pass = Callable[..., Tensor]


def apply_expert_parallel(model: nn.Module, plan: Plan, ways: AllToAll) -> None:
    """Leave each module of experts those of this rank, and let it exchange tokens with others. The
    model must be on meta."""
    size, rank = ways.num_ranks, ways.group.rank()
    stacks = find_experts(model)
    forms = {each.module: _form_of(each, size) for each in stacks}
    if not forms:
        raise _refuse(size, "the model has no experts that are stacked in one tensor for a block")
    alike = defaultdict[_Pass, list[nn.Module]](list)
    for module, form in forms.items():
        for name, _ in list(module.named_parameters(recurse=False)):
            cut_parameter(module, name, Cut("expert", 0, rank, size))
        holder: Any = module
        holder.expert_ways, holder.shared_experts_beside = ways, None
        # On a CPU our operators are plain torch.
        if not uses_own(plan) and plan.cluster.device != "cpu":
            take_over(module, form)
        holder.multiplies_float8 = multiplies_experts(plan.decided)
        alike[_by_adapters if isinstance(module, ExpertLora) else _PASSES[form]].append(module)
    for make_rows, modules in alike.items():
        override_forward(modules, "Dispatched", _dispatched(make_rows), has_part=True)


def apply_shared_experts(model: nn.Module) -> list[nn.Module]:
    """Let the shared experts of blocks compute beside the exchange of tokens, and return them. It
    comes after all else that changes what they compute."""
    found = take_apart(model, dispatched_experts(model))
    for experts, shared in found.items():
        holder: Any = experts
        holder.shared_experts_beside = shared
    return [shared.mlp for shared in found.values()]


def dispatched_experts(model: nn.Module) -> list[nn.Module]:
    """The modules that keep a part of their experts."""
    return [module for module in model.modules() if hasattr(module, "expert_ways")]


def _form_of(stack: ExpertStack, size: int) -> ExpertForm:
    """What the experts compute, or the reason why they cannot be dealt out."""
    module, name = stack.module, type(stack.module).__name__
    if stack.num_experts % size:
        raise _refuse(size, f"{name} has {stack.num_experts} experts, which {size} does not divide")
    form = module.expert_form if isinstance(module, ExpertLora) else find_form(module)
    if form is None:
        raise _refuse(size, f"{name} computes neither SwiGLU nor gpt-oss's clamped form of it")
    return form


def _refuse(size: int, why: str) -> UserError:
    return UserError(
        f"mesh.expert={size} cannot divide the experts of this model",
        why=why,
        fix="write mesh.expert=1: every rank gathers all experts of a block",
    )


def _dispatched(make_rows: _Pass) -> Callable[..., Any]:
    """A forward in which other ranks' experts take part. The compiler leaves it out: how many rows
    arrive is known when it runs."""

    @torch.compiler.disable
    def forward(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        ways: AllToAll = self.expert_ways
        shared: SharedExperts | None = self.shared_experts_beside
        trip = Dispatch.of(top_k_index, len(self.gate_up_proj) * ways.num_ranks, ways)
        sent = trip.send(hidden_states, top_k_weights)
        beside = None if shared is None else shared(hidden_states)
        routed = trip.bring_back(make_rows(self, *sent.take(), trip.experts, trip.ends))
        return routed if beside is None else routed + beside

    return lambda cls: forward


def _by_adapters(self: ExpertLora, *rows: Tensor) -> Tensor:
    return self.make_rows(*rows)


def _swiglu(self: Any, *rows: Tensor) -> Any:
    stacks = self.gate_up_proj, self.down_proj
    return ReceivedRows.apply(*rows, *stacks, self.multiplies_float8)


def _clamped_swiglu(self: Any, *rows: Tensor) -> Any:
    stacks = self.gate_up_proj.mT, self.down_proj.mT
    biases = self.gate_up_proj_bias, self.down_proj_bias
    clamp = self.alpha, self.limit
    return ReceivedRows.apply(*rows, *stacks, self.multiplies_float8, *biases, *clamp)


_PASSES: dict[ExpertForm, _Pass] = {SWIGLU: _swiglu, CLAMPED_SWIGLU: _clamped_swiglu}
