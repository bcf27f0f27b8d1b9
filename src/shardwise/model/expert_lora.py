"""Low-rank adapters of experts that are stacked in one tensor: two more grouped matmuls over the
rows of each expert, and never the sum of a weight and its adapter.

A module of experts keeps its parameters, and gets A and B for those stacks that are targets.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config.schema import AdapterConfig
from shardwise.kernels.grouped_matmul import grouped_matmul
from shardwise.kernels.packed_rows import PackedGroupedProduct
from shardwise.model.expert_forms import BIAS, STACKS, ExpertForm, find_form
from shardwise.model.expert_rows import sort_by_expert
from shardwise.model.packed import floats_shape, packing_of

_A, _B = "{}_lora_A", "{}_lora_B"


class ExpertLora:
    """What adapted or packed experts have besides their own class: a form that is known, with or
    without adapters in each of the two stacks."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    expert_form: ExpertForm
    lora_scale: float
    lora_dropout: float
    lora_is_off: bool = False
    training: bool

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """For each token, the weighted sum of what its experts make of it."""
        order, experts, places, ends = sort_by_expert(top_k_index, len(self.gate_up_proj))
        rows = hidden_states[order // top_k_index.shape[1]]
        made = self.make_rows(rows, top_k_weights.reshape(-1)[order], experts, ends)
        return made[places].sum(1)

    def make_rows(self, rows: Tensor, shares: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """For each row, what its expert makes of it, times its share. Rows are sorted by expert,
        and those of expert e end at ends[e]."""
        halves = self._product("gate_up_proj", rows, experts, ends)
        made = self._product("down_proj", self.expert_form.activate(self, halves), experts, ends)
        return made * shares.to(made.dtype)[:, None]

    def _product(self, stack: str, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        form = self.expert_form
        y = _grouped(rows, getattr(self, stack), ends, is_transposed=form.is_transposed)
        if form.is_biased:
            y = y + getattr(self, BIAS.format(stack))[experts.int()]
        a, b = (getattr(self, part.format(stack), None) for part in (_A, _B))
        if a is None or b is None or self.lora_is_off:
            return y
        kept = F.dropout(rows, self.lora_dropout, self.training) if self.lora_dropout else rows
        narrow = grouped_matmul(kept, a.mT, ends) * self.lora_scale
        return y + grouped_matmul(narrow, b.mT, ends)


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor, *, is_transposed: bool) -> Tensor:
    packing = packing_of(weight)
    if packing is None:
        return grouped_matmul(rows, weight if is_transposed else weight.mT, ends)
    lies_so = is_transposed != packing.is_turned
    y: Tensor = PackedGroupedProduct.apply(rows, weight, ends, lies_so)
    return y


@cache
def _adapted(cls: Any) -> type[nn.Module]:
    return type(f"Lora{cls.__name__}", (ExpertLora, cls), {})


def adapt_experts(
    experts: nn.Module, stack: str, form: ExpertForm, config: AdapterConfig, scale: float
) -> None:
    """Give one stack of a module of experts A and B, on the same device. They are (experts, rank,
    in) and (experts, out, rank), however the weights lie."""
    adapted: Any = experts
    weight = getattr(experts, stack)
    count, *sides = floats_shape(weight)
    inner, width = sides if form.is_transposed else reversed(sides)
    new: dict[str, Any] = {"device": weight.device, "dtype": torch.float32}
    a, b = (count, config.rank, inner), (count, width, config.rank)
    experts.register_parameter(_A.format(stack), nn.Parameter(torch.empty(a, **new)))
    experts.register_parameter(_B.format(stack), nn.Parameter(torch.empty(b, **new)))
    adapted.lora_scale, adapted.lora_dropout = scale, config.dropout
    take_over(experts, form)


def take_over(experts: nn.Module, form: ExpertForm) -> None:
    """Compute experts of this form by our forward."""
    if not isinstance(experts, ExpertLora):
        changed: Any = experts
        kind: Any = type(experts)
        changed.expert_form, changed.__class__ = form, _adapted(kind)


def form_of(experts: nn.Module) -> ExpertForm | None:
    """The form of experts, adapted or not."""
    return experts.expert_form if isinstance(experts, ExpertLora) else find_form(experts)


def adapted_stacks(experts: ExpertLora) -> dict[str, tuple[str, str]]:
    """The names of A and B of each stack that has them."""
    return {
        stack: (_A.format(stack), _B.format(stack))
        for stack in STACKS
        if hasattr(experts, _A.format(stack))
    }
