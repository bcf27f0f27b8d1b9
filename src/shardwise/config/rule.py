"""One rule about values: what must hold, and what the user should do where it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NoReturn

from shardwise.config.schema import RunConfig
from shardwise.config.schema_text import show_value, value_at
from shardwise.errors import UserError
from shardwise.files import why_no_path


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, where it was written, and what to write instead."""

    place: str
    what: str
    fix: str

    @property
    def headline(self) -> str:
        """Place and fault in one line."""
        return f"{self.place}: {self.what}" if self.place else self.what


def raise_faults(faults: list[Fault]) -> NoReturn:
    """Raise one error for all faults, so that the user can fix all of them at once."""
    if len(faults) == 1:
        raise UserError(faults[0].headline, fix=faults[0].fix)
    lines = [f"  {fault.headline}\n    fix: {fault.fix}" for fault in faults]
    raise UserError("\n".join([f"{len(faults)} settings are wrong:", *lines]))


@dataclass(frozen=True, slots=True)
class Rule:
    """A row: the field, the test that must hold, what is needed, and the fix.

    `needs` and `fix` are format strings that may name other values, as in `{c.train.steps}`. A fix
    that must be computed is a function. Settings in it are spelled as a user types them.
    """

    id: str
    field: str
    holds: Callable[[RunConfig], bool]
    needs: str
    fix: str | Callable[[RunConfig], str]

    def fault(self, config: RunConfig, place: str) -> Fault:
        """What to tell the user when the rule is broken."""
        value = show_value(value_at(config, self.field))
        what = f"{self.field} is {value}, but {self.needs.format(c=config)}"
        fix = self.fix.format(c=config) if isinstance(self.fix, str) else self.fix(config)
        return Fault(place, what, fix)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_rule(
    field: str, test: Callable[[float], bool], needs: str, fix: str, name: str
) -> Rule:
    def holds(config: RunConfig) -> bool:
        value = value_at(config, field)
        return not _is_number(value) or test(value)

    return Rule(f"{field}-{name}", field, holds, needs, fix)


def at_least(low: int, *fields: str) -> list[Rule]:
    """Rows for numbers that have a least value."""
    return [
        _number_rule(
            field,
            lambda value: value >= low,
            f"the least is {low}",
            f"write {field}={low} or more",
            "minimum",
        )
        for field in fields
    ]


def above_zero(field: str, usual: str, most: float = inf) -> Rule:
    """A row for a number that must be positive, and may have a largest value."""
    return _number_rule(
        field,
        lambda value: 0 < value <= most,
        "it must be above 0" + ("" if most == inf else f" and at most {most:g}"),
        f"a usual value is {field}={usual}",
        "positive",
    )


def within(field: str, low: float, high: float) -> Rule:
    """A row for a share."""
    return _number_rule(
        field,
        lambda value: low <= value <= high,
        f"it must lie between {low:g} and {high:g}",
        f"write a share of one, such as {field}={high / 5:g}",
        "range",
    )


def path_rule(field: str) -> Rule:
    """A row for a field that may name a file."""

    def holds(config: RunConfig) -> bool:
        value = value_at(config, field)
        texts = value if isinstance(value, list) else [value]
        return all(text is None or why_no_path(text) is None for text in texts)

    return Rule(
        f"{field}-is-a-path",
        field,
        holds,
        "a file name has at most 255 bytes, a path at most 4095, and neither contains a NUL byte",
        f"write {field}=A_SHORTER_NAME",
    )
