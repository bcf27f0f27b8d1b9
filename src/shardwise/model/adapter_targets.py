"""Which layers of a model get adapters: linear layers, and stacks of experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from shardwise.config.schema import ALL_LINEAR, AdapterConfig
from shardwise.errors import UserError
from shardwise.model.expert_forms import STACKS, ExpertForm
from shardwise.model.expert_lora import form_of
from shardwise.model.head import head_of
from shardwise.model.quantised import Packed
from shardwise.model.routers import ROUTER_NAMES

_MOST_NAMED = 12
# Grouped matmuls of bf16 want rows of whole 16 bytes.
_EXPERT_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Targets:
    """What gets adapters, in the model's order, and kinds of layers that do not."""

    layers: dict[str, nn.Linear]
    stacks: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    """Stacks of experts by the name of the parameter: the module, and what it calls the stack."""

    forms: dict[nn.Module, ExpertForm] = field(default_factory=dict)
    """What the experts of these modules compute."""

    left: tuple[str, ...] = ()
    whole: dict[str, nn.Module] = field(default_factory=dict)
    """Modules that are trained themselves."""


def find_targets(model: nn.Module, config: AdapterConfig) -> Targets:
    """The layers that the patterns match. Raises where a pattern matches none, or the head."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    stacks = _find_stacks(model)
    head = head_of(model)
    usual = [
        name
        for name, module in linears.items()
        if module is not head and _last(name) not in ROUTER_NAMES
    ]
    patterns = [config.targets] if isinstance(config.targets, str) else config.targets
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in (*linears, *stacks) if _matches(name, pattern)}
        if pattern == ALL_LINEAR:
            matched = set(usual)
        meant = {n for n in matched if n in usual or n in stacks or _last(pattern) == _last(n)}
        if not meant:
            raise _nothing_matches(pattern, [*usual, *stacks])
        if any(linears.get(name) is head for name in meant):
            raise _refuse_head(pattern)
        found |= meant
    whole = _find_whole(model, config.modules_to_save)
    chosen = {name: place for name, place in stacks.items() if name in found}
    targets = Targets(
        {name: module for name, module in linears.items() if name in found},
        chosen,
        _forms_of(chosen),
        _left_out([n for n in (*linears, *stacks) if n not in whole], found),
        whole,
    )
    _validate_experts(targets, config)
    if config.dora:
        _validate_dora(targets)
    return targets


def _find_whole(model: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    """The modules that are trained whole. Raises where a pattern matches none that may be."""
    head = head_of(model)
    possible = {
        name: module
        for name, module in model.named_modules()
        if module is head or isinstance(module, nn.Embedding) or _is_norm(module)
    }
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in possible if _matches(name, pattern)}
        if not matched:
            names = list(dict.fromkeys(map(_last, possible)))
            raise UserError(
                f"adapter.modules_to_save: {pattern} matches no module that may be trained whole",
                why=f"embeddings, the head and norms may; the model's are {', '.join(names)}",
                fix=f"write adapter.modules_to_save=[{','.join(names[:1])}], or leave "
                "adapter.modules_to_save out",
            )
        found |= matched
    return {name: module for name, module in possible.items() if name in found}


def _is_norm(module: nn.Module) -> bool:
    """Whether all that it has is a weight for each channel, and perhaps a bias."""
    own = dict(module.named_parameters())
    return "weight" in own and own.keys() <= {"weight", "bias"} and own["weight"].ndim == 1


def _find_stacks(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    return {
        f"{name}.{stack}": (module, stack)
        for name, module in model.named_modules()
        for stack in STACKS
        if getattr(getattr(module, stack, None), "ndim", 0) == 3
    }


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _left_out(names: Collection[str], chosen: set[str]) -> tuple[str, ...]:
    """Kinds of layers without adapters."""
    kinds = Counter(".".join(name.split(".")[-2:]) for name in names if name not in chosen)
    return tuple(f"{count} x {kind.removeprefix('model.')}" for kind, count in kinds.items())


def _validate_dora(targets: Targets) -> None:
    """Raise where DoRA would have to know what a layer does besides its matmul."""
    others = [
        name
        for name, layer in targets.layers.items()
        if type(layer) is not nn.Linear and not isinstance(layer, Packed)
    ]
    for name in (*targets.stacks, *others):
        raise UserError(
            f"adapter.dora is for plain linear layers, and {name} is none",
            fix="leave it out of adapter.targets, or leave adapter.dora out",
        )


def _forms_of(stacks: Mapping[str, tuple[nn.Module, str]]) -> dict[nn.Module, ExpertForm]:
    """The form of each module of experts. Raises for one that computes something else."""
    forms: dict[nn.Module, ExpertForm] = {}
    for name, (experts, _) in stacks.items():
        form = forms.get(experts) or form_of(experts)
        if form is None:
            raise UserError(
                f"adapter.targets matches {name}, whose experts get no adapters yet",
                why="experts must be SwiGLU, plain as Mixtral's or clamped as gpt-oss's",
                fix="write adapter.targets=all-linear, which leaves experts out",
            )
        forms[experts] = form
    return forms


def _validate_experts(targets: Targets, config: AdapterConfig) -> None:
    """Raise for adapters that cannot be multiplied in groups."""
    if targets.stacks and config.rank % _EXPERT_MULTIPLE:
        raise UserError(
            f"adapter.rank={config.rank}, and adapters of experts need a multiple of "
            f"{_EXPERT_MULTIPLE}",
            why="grouped matmuls take rows of whole 16 bytes",
            fix=f"write adapter.rank={-(-config.rank // _EXPERT_MULTIPLE) * _EXPERT_MULTIPLE}, or "
            "adapter.targets=all-linear, which leaves experts out",
        )


def _nothing_matches(pattern: str, possible: Collection[str]) -> UserError:
    names = list(dict.fromkeys(map(_last, possible)))
    if not names:
        return UserError(
            f"adapter.targets={pattern} matches no layer: the model has no linear layers",
            why="its weights are in modules of its own classes, which get no adapters yet",
            fix="write adapter.method=none to train all of its weights",
        )
    return UserError(
        f"adapter.targets: {pattern} matches no layer that may get adapters",
        why=f"the model's linear layers are {', '.join(names[:_MOST_NAMED])}"
        + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""),
        fix=f"write adapter.targets=all-linear, or adapter.targets=[{','.join(names[:2])}]",
    )


def _refuse_head(pattern: str) -> UserError:
    return UserError(
        f"adapter.targets: {pattern} matches the output head, which gets no adapters yet",
        why="the head and the loss are computed as one operation, which reads the head's weight",
        fix="leave it out: adapter.targets=all-linear is every linear layer but the head",
    )
