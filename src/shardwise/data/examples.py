"""Rows of a source as examples: tokens, and which of them are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from shardwise.config.schema import DataConfig
from shardwise.data.cache import draw_of
from shardwise.data.conversation import read_conversation
from shardwise.data.masking import TOO_LONG, Example, build_example, build_together
from shardwise.data.paths import readable_data
from shardwise.data.preference_rows import read_preference
from shardwise.data.records import CorruptRecord
from shardwise.data.rows import read_conversation_rows
from shardwise.data.template import ChatTemplate
from shardwise.data.workers import make_in_order, usable_cores
from shardwise.errors import UserError

OnSkip = Callable[[str, CorruptRecord], None]


def read_examples(
    config: DataConfig, template: ChatTemplate, on_skip: OnSkip, max_rows: int | None = None
) -> Iterator[tuple[Example, ...]]:
    """The examples of each row that has something to train on: one, or the two of a pair. The other
    rows go to `on_skip`."""
    make = ExampleMaker(config, template)
    with readable_data():
        rows = islice(read_conversation_rows(config), max_rows)
        for name, made in make_in_order(rows, make, config.workers or usable_cores()):
            if isinstance(made, CorruptRecord):
                on_skip(name, made)
            elif isinstance(made, UserError):
                raise made
            else:
                yield made


@dataclass(frozen=True, slots=True)
class ExampleMaker:
    """Makes the examples of one row, in whatever process. Faults are results: they are counted in
    the order of the rows."""

    config: DataConfig
    template: ChatTemplate

    def __call__(
        self, named: tuple[str, Any]
    ) -> tuple[str, tuple[Example, ...] | CorruptRecord | UserError]:
        """The name of the row, and what became of it."""
        name, row = named
        try:
            if isinstance(row, CorruptRecord):
                raise row
            return name, _examples_of(row, self.config, self.template, name)
        except (CorruptRecord, UserError) as fault:
            return name, fault


def _examples_of(
    row: dict[str, Any], config: DataConfig, template: ChatTemplate, name: str
) -> tuple[Example, ...]:
    # Where windows may cut a conversation, it has any length.
    seq_len = None if config.packing == "cut" else config.seq_len
    if not config.has_preferences:
        conversation = read_conversation(row, config.format)
        return (build_example(conversation, template, seq_len, name),)
    found = read_preference(row, config.format)
    examples = build_together(found.conversations, template, seq_len, name)
    draw = draw_of(found.prompt.text())
    return tuple(
        replace(example, draw=draw, is_preferred=is_preferred)
        for example, is_preferred in zip(examples, found.preferred, strict=True)
    )


def nothing_left(config: DataConfig, skipped: Iterable[str]) -> UserError:
    """The error for a source of which no row can be trained on."""
    forms = ("pairs", "labelled") if config.has_preferences else ("chat", "prompt", "instruction")
    named = list(skipped)
    fix = f"name files with {config.unit}s: data.path=FILES; the form of their rows is " + (
        ", or ".join(f"data.format={form}" for form in forms)
    )
    if named and all(TOO_LONG in name for name in named):
        fix = f"write a larger data.seq_len, such as data.seq_len={4 * config.seq_len}"
    return UserError(
        f"data.source {config.source} has no {config.unit} to train on",
        why="; ".join(named) or "it has no rows",
        fix=fix,
    )
