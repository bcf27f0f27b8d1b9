"""Which layers of a model get adapters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from shardwise.config.schema import ALL_LINEAR, AdapterConfig
from shardwise.errors import UserError
from shardwise.model.head import head_of
from shardwise.model.routers import ROUTER_NAMES

_MOST_NAMED = 12


@dataclass(frozen=True, slots=True)
class Targets:
    """The layers that get adapters, and kinds of layers that do not, with the reason."""

    layers: dict[str, nn.Linear]
    left: tuple[str, ...]


def find_targets(model: nn.Module, config: AdapterConfig) -> Targets:
    """The linear layers that the patterns match. Raises where a pattern matches none, or the
    head."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    head = head_of(model)
    usual = {
        name: module
        for name, module in linears.items()
        if module is not head and _last(name) not in ROUTER_NAMES
    }
    if config.targets == ALL_LINEAR:
        _validate_any(usual, ALL_LINEAR, usual)
        return Targets(usual, _left_out(model, linears, usual))
    patterns = [config.targets] if isinstance(config.targets, str) else config.targets
    found: dict[str, nn.Linear] = {}
    for pattern in patterns:
        matched = {name: m for name, m in linears.items() if _matches(name, pattern)}
        _validate_any(matched, pattern, usual)
        if any(module is head for module in matched.values()):
            raise _refuse_head(pattern)
        found |= {name: m for name, m in matched.items() if name in usual or _names(name, pattern)}
    _validate_any(found, str(config.targets), usual)
    # The model's own order, whatever the order of the patterns is.
    layers = {name: module for name, module in linears.items() if name in found}
    return Targets(layers, _left_out(model, linears, layers))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _names(name: str, pattern: str) -> bool:
    """Whether the pattern spells out the layer's own name, so that it is meant."""
    return _last(pattern) == _last(name)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _left_out(
    model: nn.Module, linears: dict[str, nn.Linear], chosen: dict[str, nn.Linear]
) -> tuple[str, ...]:
    """Kinds of layers without adapters: linear layers, and stacks of experts, which are none."""
    kinds = Counter(_last(name) for name in linears if name not in chosen)
    stacks = Counter(
        name
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if param.dim() == 3
    )
    named = [f"{count} x {name}" for name, count in kinds.items()]
    return (*named, *(f"{count} x {name} (stacked experts)" for name, count in stacks.items()))


def _validate_any(found: dict[str, nn.Linear], pattern: str, usual: dict[str, nn.Linear]) -> None:
    if found:
        return
    names = list(dict.fromkeys(_last(name) for name in usual))
    if not names:
        raise UserError(
            f"adapter.targets={pattern} matches no layer: the model has no linear layers",
            why="its weights are in modules of its own classes, which get no adapters yet",
            fix="write adapter.method=none to train all of its weights",
        )
    raise UserError(
        f"adapter.targets: {pattern} matches no linear layer that may get adapters",
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
