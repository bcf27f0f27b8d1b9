"""Tensor and sequence parallelism: ranks that compute each block together.

Each rank keeps a part of the heads of attention and of the channels of an MLP, so what a module
computes is a part of a sum over the ranks. Between these modules the ranks divide the tokens:
norms and the residual are computed once. A module begins with an all-gather of rows, and ends with
a reduce-scatter. Without sequence parallelism every rank has all tokens, and a module ends with an
all-reduce.

What is outside the blocks all ranks compute alike, on all tokens. Only the tables of tokens are
divided, by their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.model.blocks import UnitMap, is_norm, iter_modules
from shardwise.model.copies import mark_shares
from shardwise.model.cuts import Cut, cut_parameter, cut_tied, own_cuts
from shardwise.model.expert_lora import ExpertLora
from shardwise.model.head import embedding_of, head_of
from shardwise.model.lora import Lora
from shardwise.model.override import surround_forward
from shardwise.model.tensor_rules import Layout, find_layout
from shardwise.parallel import moved_rows
from shardwise.parallel.expert_parallel import dispatched_experts
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.stages import Stages, stages_of
from shardwise.plan.planned import Plan

Move = Callable[[Tensor, str], Tensor]


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The ranks that compute together, as one of them sees them."""

    group: str
    index: int
    count: int


def apply_tensor(model: Any, units: UnitMap, plan: Plan, mesh: Mesh) -> None:
    """Divide the parameters of `model`, which is on meta, and what it computes with them."""
    group = mesh.group("tensor")
    if group is None:
        return
    ranks = _Ranks(moved_rows.name_of(group), group.rank(), group.size())
    blocks = [module for unit in units.blocks for module in iter_modules(model, unit)]
    _validate_heads(model, ranks.count)
    if mesh.group("expert") is None:
        _refuse_adapted_stacks(model, ranks.count)
    layout = _without_dispatched(find_layout(model), model)
    regions = [part for block in blocks for part in _parts_of(block, model, layout)]
    sequence = plan.decided.sequence_parallel
    _divide_blocks(model, layout, ranks)
    _divide_tables(model, ranks)
    _mark_copies(model, blocks if sequence else regions, ranks)
    enter, leave = (
        (moved_rows.gather_rows, moved_rows.sum_to_rows)
        if sequence
        else (moved_rows.share, moved_rows.sum_parts)
    )
    for region in regions:
        region.register_forward_pre_hook(_moves_input(enter, ranks.group), with_kwargs=True)
        region.register_forward_hook(_moves_output(leave, ranks.group))
    if sequence:
        first, last = _ends(model, blocks, stages_of(plan, mesh))
        for block in first:
            divide = _moves_input(moved_rows.own_rows, ranks.group)
            block.register_forward_pre_hook(divide, with_kwargs=True)
        for block in last:
            block.register_forward_hook(_moves_output(moved_rows.all_rows, ranks.group))


def _ends(
    model: Any, blocks: list[nn.Module], stages: Stages | None
) -> tuple[list[nn.Module], list[nn.Module]]:
    """The blocks before which tokens are divided, and those after which they come together again.

    Every stage of a pipeline begins with whole sequences, and only the last one ends with them.
    """
    if stages is None:
        return blocks[:1], blocks[-1:]
    layers = model.base_model.layers
    first = [layers.get_submodule(str(stages.blocks[number][0])) for number in stages.own]
    return first, blocks[-1:] if stages.last in stages.own else []


def _is_by_token(module: nn.Module) -> bool:
    """Whether a module computes each token by itself, so that a rank may have some of them."""
    return is_norm(module) or bool(dispatched_experts(module))


def _without_dispatched(layout: Layout, model: nn.Module) -> Layout:
    """The layout without modules whose tokens travel to experts: they take a rank's own tokens."""
    experts = dispatched_experts(model)
    if not experts:
        return layout
    inside = {id(each) for each in experts}
    apart = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if any(id(child) in inside for child in module.children())
    )
    return Layout(
        {n: each for n, each in layout.divided.items() if not n.startswith(apart)},
        frozenset(n for n in layout.added_once if not n.startswith(apart)),
    )


def _validate_heads(model: Any, count: int) -> None:
    """Raise where a rank would have a part of a head."""
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % count:
            raise UserError(
                f"mesh.tensor={count} does not divide {name}={heads}",
                why="each rank computes whole heads",
                fix="write mesh.tensor=1, or a size that divides it",
            )


def _refuse_adapted_stacks(model: nn.Module, count: int) -> None:
    if any(isinstance(module, ExpertLora) for module in model.modules()):
        raise UserError(
            f"mesh.tensor={count} does not suit adapters of stacked experts",
            why="only adapters of linear layers are divided",
            fix="leave the experts out of adapter.targets, or write mesh.tensor=1",
        )


def _parts_of(block: nn.Module, model: Any, layout: Layout) -> Iterator[nn.Module]:
    """The modules of a block that have divided parameters. All others must compute each token by
    itself, as norms do."""
    names = {id(module): name for name, module in model.named_modules()}
    for child in block.children():
        prefix = f"{names[id(child)]}."
        if any(name.startswith(prefix) for name in layout.divided):
            yield child
        elif any(True for _ in child.parameters()) and not _is_by_token(child):
            raise UserError(
                f"mesh.tensor does not divide {model.config.model_type} models",
                why=f"nothing is known about {type(child).__name__}, a part of its blocks",
                fix="write mesh.tensor=1",
            )


def _divide_blocks(model: nn.Module, layout: Layout, ranks: _Ranks) -> None:
    for name, division in layout.divided.items():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        length = module.get_parameter(own).shape[division.dim] // division.stacked
        if length % ranks.count:
            raise UserError(
                f"mesh.tensor={ranks.count} does not divide {name}",
                why=f"it has {length} {'rows' if division.dim == 0 else 'columns'} to divide",
                fix="write mesh.tensor=1, or a size that divides it",
            )
        cut = Cut("tensor", division.dim, ranks.index, ranks.count, division.stacked)
        cut_parameter(module, own, cut)
    adding = [model.get_submodule(name.rpartition(".")[0]) for name in sorted(layout.added_once)]
    linears = [module for module in adding if isinstance(module, nn.Linear)]
    surround_forward([*linears], "Adding", _add_once(ranks.count))
    experts = [module for module in adding if not isinstance(module, nn.Linear)]
    surround_forward(experts, "Adding", _add_once_for_each(ranks.count))


def _add_once(count: int) -> Callable[..., Any]:
    """A layer whose bias every rank adds to a part of a sum, so that the sum has it once."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def adding(self: nn.Linear, given: Tensor) -> Tensor:
            if isinstance(self, Lora):
                added: Tensor = forward(self, given) - self.bias * (1 - 1 / count)
                return added
            return F.linear(given, self.weight, self.bias / count)

        return adding

    return around


def _add_once_for_each(count: int) -> Callable[..., Any]:
    """The same for the last biases of experts: what is too much is taken away again."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def adding(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            out: Tensor = forward(self, hidden, chosen, weights)
            bias = self.down_proj_bias
            by_expert = weights.new_zeros(len(hidden), len(bias)).scatter_add(1, chosen, weights)
            return out - (by_expert.to(bias.dtype) @ bias) * (1 - 1 / count)

        return adding

    return around


def _divide_tables(model: nn.Module, ranks: _Ranks) -> None:
    """Divide the rows of the table of tokens, and of the head."""
    embedding, head = embedding_of(model), head_of(model)
    cut = Cut("tensor", 0, ranks.index, ranks.count)
    tables = [module for module in (embedding, head) if module is not None]
    weights = {id(module.weight) for module in tables}
    if len(weights) == 1:
        cut_tied(tables, "weight", cut)
    else:
        for module in tables:
            cut_parameter(module, "weight", cut)
    if head is not None and getattr(head, "bias", None) is not None:
        cut_parameter(head, "bias", cut)
    if isinstance(embedding, nn.Embedding):
        part = own_cuts(embedding)["weight"].part
        embedding.padding_idx = _inside(embedding.padding_idx, part)
        surround_forward([embedding], "Divided", _lookup(part, ranks.group))


def _inside(place: int | None, part: range) -> int | None:
    return None if place is None or place not in part else place - part.start


def _lookup(part: range, group: str) -> Callable[..., Any]:
    """Look up the rows that this rank has, and add up the results of all ranks."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def divided(self: nn.Module, ids: Tensor) -> Tensor:
            is_here = (ids >= part.start) & (ids < part.stop)
            found = forward(self, torch.where(is_here, ids - part.start, 0))
            return moved_rows.sum_parts(found * is_here[..., None], group)

        return divided

    return around


def _mark_copies(model: nn.Module, partial: Sequence[nn.Module], ranks: _Ranks) -> None:
    """Inside `partial` a rank's gradient is a part of the sum. Elsewhere all ranks have all of
    it."""
    mark_shares(model.modules(), 1 / ranks.count)
    for module in partial:
        mark_shares(module.modules(), 1.0)


def _moves_input(move: Move, group: str) -> Callable[..., Any]:
    """A hook that moves a module's first argument, which is the hidden state."""

    def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if given:
            return (move(given[0], group), *given[1:]), named
        return given, {**named, "hidden_states": move(named["hidden_states"], group)}

    return hook


def _moves_output(move: Move, group: str) -> Callable[..., Any]:
    """A hook that moves a module's first result."""

    def hook(module: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (move(output[0], group), *output[1:])
        return move(output, group)

    return hook
