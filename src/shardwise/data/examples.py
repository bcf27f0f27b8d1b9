"""Rows of a source as examples: tokens, and which of them are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shardwise.config.schema import DataConfig
from shardwise.data.conversation import read_conversation
from shardwise.data.files import readable_data
from shardwise.data.masking import Example, build_example
from shardwise.data.records import CorruptRecord
from shardwise.data.rows import read_conversation_rows
from shardwise.data.template import ChatTemplate
from shardwise.data.workers import make_in_order, usable_cores
from shardwise.errors import UserError

OnSkip = Callable[[str, CorruptRecord], None]


def read_examples(
    config: DataConfig, template: ChatTemplate, on_skip: OnSkip, max_rows: int | None = None
) -> Iterator[Example]:
    """An example for each row that has something to train on. The others go to `on_skip`."""
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
    """Makes the example of one row, in whatever process. Faults are results: they are counted in
    the order of the rows."""

    config: DataConfig
    template: ChatTemplate

    def __call__(self, named: tuple[str, Any]) -> tuple[str, Example | CorruptRecord | UserError]:
        """The name of the row, and what became of it."""
        name, row = named
        # Where windows may cut a conversation, it has any length.
        seq_len = None if self.config.packing == "cut" else self.config.seq_len
        try:
            if isinstance(row, CorruptRecord):
                raise row
            conversation = read_conversation(row, self.config.format)
            return name, build_example(conversation, self.template, seq_len, name)
        except (CorruptRecord, UserError) as fault:
            return name, fault


def nothing_left(config: DataConfig, skipped: Iterable[str]) -> UserError:
    """The error for a source of which no row can be trained on."""
    return UserError(
        f"data.source {config.source} has no conversation to train on",
        why="; ".join(skipped) or "it has no rows",
        fix="name files with conversations: data.path=FILES; the form of their rows is "
        "data.format=chat, or data.format=prompt, or data.format=instruction",
    )
