"""Rules: what a key of another tool becomes. A reader is a table of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from shardwise.migrate.foreign_values import Convert
from shardwise.migrate.line import (
    BadValueError,
    Line,
    Outcome,
    Settings,
    always,
    changed,
    dropped,
    mapped,
    other_task,
)
from shardwise.migrate.source import Leaf, Source

Translate = Callable[[Any, Source], Outcome]
_OFF = (False, 0, "", "no", "none", "off", "false", "disabled")
_NONE_HERE = "it is off in the file, and there is none here"
_UNSET = "it is unset in the file"


@dataclass(frozen=True, slots=True)
class KeyRule:
    """How a value is translated. Only a `raw` rule sees null and `auto`, which else mean that
    the file leaves the key to somebody else."""

    translate: Translate
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the other tool does where a file has none of `keys`."""

    keys: tuple[str, ...]
    value: Any
    settings: Settings
    why: str
    when: Callable[[Source], bool] = lambda _: True


@dataclass(frozen=True, slots=True)
class Reader:
    """One tool: its name for `--from`, its title, its rules by key, and its defaults."""

    kind: str
    title: str
    rules: Mapping[str, KeyRule]
    assumed: tuple[Assumed, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    """Keys that hold, or name the file of, a configuration of another tool, and its kind."""

    prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda tree: tree
    """What the tool itself does to the tree before it reads it."""

    auto: str = "`auto` leaves it to the tool; here the plan or the default decides"


def translate(reader: Reader, source: Source, followed: Collection[str] = ()) -> list[Line]:
    """A line for every key of the file, then one for each default that numbers depend on.

    Of keys that were `followed` into another tool's configuration, that one has the lines.
    """
    lines = []
    for leaf in source.leaves():
        link = next((key for key in followed if f"{leaf.key}.".startswith(f"{key}.")), None)
        if link is None:
            lines.append(Line(leaf.key, leaf.value, _outcome(reader, leaf, source)))
        elif link == leaf.key:
            lines.append(Line(leaf.key, leaf.value, always("that file was read; its keys follow")))
    taken = {path for line in lines for path in line.outcome.settings}
    for default in reader.assumed:
        present = any(source.get(key) is not None for key in default.keys)
        if present or taken & set(default.settings) or not default.when(source):
            continue
        outcome = Outcome("assumed", default.why, default.settings)
        lines.append(Line(default.keys[0], default.value, outcome))
    return lines


def _outcome(reader: Reader, leaf: Leaf, source: Source) -> Outcome:
    rule = next((reader.rules[name] for name in leaf.patterns if name in reader.rules), None)
    if rule is None and leaf.value in (None, {}, []) and _is_section(reader, leaf):
        return dropped(_UNSET)
    if rule is None:
        return dropped(_unknown(reader, leaf))
    if not rule.raw and leaf.value in (None, {}, []):
        return dropped(_UNSET)
    if not rule.raw and leaf.value == "auto":
        return changed({}, reader.auto)
    try:
        return rule.translate(leaf.value, source)
    except BadValueError as error:
        return dropped(f"{error}, so nothing is made of it")


def _is_section(reader: Reader, leaf: Leaf) -> bool:
    return any(name.startswith((f"{leaf.key}.", f"{leaf.key}[")) for name in reader.rules)


def _unknown(reader: Reader, leaf: Leaf) -> str:
    name = leaf.path[-1]
    known = {pattern.rpartition(".")[2] for pattern in reader.rules} - {"*"}
    near = get_close_matches(name, sorted(known - {name}), n=1, cutoff=0.8)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"unknown: no key of {reader.title} that we know{hint}"


# ---- the common kinds of rules ---------------------------------------------------------------


def to(path: str, convert: Convert, why: str) -> KeyRule:
    """The value, converted, is a setting of ours with the same meaning."""
    return KeyRule(lambda value, _: mapped({path: convert(value)}, why))


def nearly(path: str, convert: Convert, why: str) -> KeyRule:
    """The value, converted, is the nearest setting of ours."""
    return KeyRule(lambda value, _: changed({path: convert(value)}, why))


def drop(why: str) -> KeyRule:
    """There is nothing like it."""
    return KeyRule(lambda _value, _source: dropped(why))


def kept(why: str) -> KeyRule:
    """Whatever the file says, every run of ours does it."""
    return KeyRule(lambda _value, _source: always(why))


def otherwise(why: str) -> KeyRule:
    """It is done in another way, which no setting chooses."""
    return KeyRule(lambda _value, _source: changed({}, why))


def unless(why: str, *off: Any) -> KeyRule:
    """Nothing is lost where the file turns it off, or leaves it at one of `off`."""

    def decide(value: Any, _: Source) -> Outcome:
        still = value.strip().lower() if isinstance(value, str) else value
        if still in (*_OFF, *off):
            return always(_NONE_HERE)
        return dropped(why)

    return KeyRule(decide)


def task(why: str) -> KeyRule:
    """What the file asks for is another task than ours."""

    def decide(value: Any, _: Source) -> Outcome:
        still = value.strip().lower() if isinstance(value, str) else value
        return always(_NONE_HERE) if still in _OFF else other_task(why)

    return KeyRule(decide)


def each(rule: KeyRule, keys: str | Iterable[str], prefix: str = "") -> dict[str, KeyRule]:
    """The same rule under many keys: a text with spaces, or a list."""
    listed = keys.split() if isinstance(keys, str) else keys
    return {f"{prefix}{key}": rule for key in listed}
