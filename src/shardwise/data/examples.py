"""Rows of a source as examples: tokens, and which of them are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from shardwise.config.schema import DataConfig
from shardwise.data.conversation import read_conversation
from shardwise.data.files import readable_data
from shardwise.data.masking import Example, build_example
from shardwise.data.records import CorruptRecord
from shardwise.data.rows import read_conversation_rows
from shardwise.data.template import ChatTemplate
from shardwise.errors import UserError

OnSkip = Callable[[str, CorruptRecord], None]


def read_examples(
    config: DataConfig, template: ChatTemplate, on_skip: OnSkip, max_rows: int | None = None
) -> Iterator[Example]:
    """An example for each row that has something to train on. The others go to `on_skip`."""
    # Where windows may cut a conversation, it has any length.
    seq_len = None if config.packing == "cut" else config.seq_len
    with readable_data():
        for name, row in islice(read_conversation_rows(config), max_rows):
            try:
                if isinstance(row, CorruptRecord):
                    raise row
                conversation = read_conversation(row, config.format)
                yield build_example(conversation, template, seq_len, name)
            except CorruptRecord as fault:
                on_skip(name, fault)


def nothing_left(config: DataConfig, skipped: Iterable[str]) -> UserError:
    """The error for a source of which no row can be trained on."""
    return UserError(
        f"data.source {config.source} has no conversation to train on",
        why="; ".join(skipped) or "it has no rows",
        fix="name files with conversations: data.path=FILES; the form of their rows is "
        "data.format=chat, or data.format=prompt, or data.format=instruction",
    )
