"""What conversations become as tokens: counts, rows that are left out, and a few samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from shardwise.config.schema import DataConfig
from shardwise.data.conversation import read_conversation
from shardwise.data.masking import Example, build_example
from shardwise.data.records import CorruptRecord
from shardwise.data.rows import read_conversation_rows
from shardwise.data.template import ChatTemplate
from shardwise.errors import UserError

_NAMED_PER_REASON = 3


class SkippedRows:
    """Rows that are not trained on: how many for each reason, and the first of them by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.named: dict[str, list[str]] = {}

    def skip(self, name: str, fault: CorruptRecord) -> None:
        """Count one row."""
        self.counts[fault.reason] += 1
        named = self.named.setdefault(fault.reason, [])
        if len(named) < _NAMED_PER_REASON:
            named.append(f"{name}: {fault}")


@dataclass(slots=True)
class Survey:
    """All examples of a source, counted."""

    num_rows: int = 0
    num_conversations: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_cut: int = 0
    longest_tokens: int = 0
    skipped: SkippedRows = field(default_factory=SkippedRows)
    samples: list[Example] = field(default_factory=list)

    def add(self, example: Example) -> None:
        """Count one example."""
        self.num_conversations += 1
        self.num_tokens += len(example.ids)
        self.num_trained_tokens += int(example.mask.sum())
        self.num_cut += example.is_cut
        self.longest_tokens = max(self.longest_tokens, len(example.ids))


def read_examples(
    config: DataConfig, template: ChatTemplate, skipped: SkippedRows, max_rows: int | None = None
) -> Iterator[Example]:
    """An example for each row that has something to train on. The others go to `skipped`."""
    for name, row in islice(read_conversation_rows(config), max_rows):
        try:
            if isinstance(row, CorruptRecord):
                raise row
            conversation = read_conversation(row, config.format)
            yield build_example(conversation, template, config.seq_len, name)
        except CorruptRecord as fault:
            skipped.skip(name, fault)


def survey_examples(
    config: DataConfig, template: ChatTemplate, *, num_samples: int, max_rows: int | None = None
) -> Survey:
    """Count what the rows of a source become. Raises where nothing is left to train on."""
    survey = Survey()
    for example in read_examples(config, template, survey.skipped, max_rows):
        survey.add(example)
        if len(survey.samples) < num_samples:
            survey.samples.append(example)
    survey.num_rows = survey.num_conversations + survey.skipped.counts.total()
    if survey.num_conversations == 0:
        raise _nothing_left(config, survey.skipped)
    return survey


def _nothing_left(config: DataConfig, skipped: SkippedRows) -> UserError:
    rows = [name for names in skipped.named.values() for name in names]
    return UserError(
        f"data.source {config.source} has no conversation to train on",
        why="; ".join(rows) or "it has no rows",
        fix="name files with conversations: data.path=FILES; the form of their rows is "
        "data.format=chat, or data.format=prompt, or data.format=instruction",
    )
