"""What conversations become as tokens: counts, rows that are left out, and a few samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from shardwise.config.mixed_datasets import datasets_of
from shardwise.config.schema import DataConfig, ModelConfig
from shardwise.data.examples import nothing_left, read_examples
from shardwise.data.masking import Example
from shardwise.data.packing import pack, packing_of
from shardwise.data.paths import find_files
from shardwise.data.records import CorruptRecord
from shardwise.data.template import ChatTemplate, load_chat_template
from shardwise.data.tokenizer import load_tokenizer
from shardwise.errors import UserError

_NAMED_PER_REASON = 3
# Enough for a plan to say a share to a percent or two, and read in about a second.
_SAMPLED_ROWS = 500


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
    lengths: list[int] = field(default_factory=list)
    """The tokens of each row, which are those of both answers of a pair."""
    num_trained_tokens: int = 0
    num_cut: int = 0
    num_windows: int = 0
    """The sequences that they are packed into."""
    skipped: SkippedRows = field(default_factory=SkippedRows)
    samples: list[tuple[Example, ...]] = field(default_factory=list)

    def add(self, examples: tuple[Example, ...]) -> None:
        """Count the examples of one row."""
        self.lengths.append(sum(len(example.ids) for example in examples))
        self.num_trained_tokens += sum(int(example.mask.sum()) for example in examples)
        self.num_cut += examples[0].is_cut

    @property
    def num_conversations(self) -> int:
        """Rows that are trained on."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """All tokens of these, without padding."""
        return sum(self.lengths)

    @property
    def trained_share(self) -> float:
        """The share of the tokens that the loss is computed on."""
        return self.num_trained_tokens / self.num_tokens

    def padding_share(self, seq_len: int) -> float:
        """The share of the sequences that holds no token."""
        return 1 - self.num_tokens / (self.num_windows * seq_len)


def survey_examples(
    config: DataConfig, template: ChatTemplate, *, num_samples: int, max_rows: int | None = None
) -> Survey:
    """Count what the rows of a source become. Raises where nothing is left to train on."""
    survey = Survey()
    for examples in read_examples(config, template, survey.skipped.skip, max_rows):
        survey.add(examples)
        if len(survey.samples) < num_samples:
            survey.samples.append(examples)
    survey.num_rows = survey.num_conversations + survey.skipped.counts.total()
    if survey.num_conversations == 0:
        rows = [name for names in survey.skipped.named.values() for name in names]
        raise nothing_left(config, rows)
    lengths = np.array(survey.lengths, dtype=np.int64)
    begins = np.cumsum(lengths) - lengths
    survey.num_windows = len(pack(begins, lengths, config.seq_len, packing_of(config)))
    return survey


def share_in_words(config: DataConfig, model: ModelConfig) -> str:
    """What the first rows say of all: how much is trained on, and how much is padding."""
    if not config.mixture:
        return _share_of_one(config, model)
    words = ((each.name, _share_of_one(each.data, model)) for each in datasets_of(config))
    return "; ".join(f"{name}: {told}" for name, told in words)


def _share_of_one(config: DataConfig, model: ModelConfig) -> str:
    try:
        if config.source != "datasets":
            # A tokenizer of the hub takes long to be missed; files do not.
            find_files(config)
        tokenizer = load_tokenizer(config.tokenizer, model.name, revision=model.revision)
        template = load_chat_template(tokenizer, config.chat_template)
        found = survey_examples(config, template, num_samples=0, max_rows=_SAMPLED_ROWS)
    except UserError as error:
        # A plan may be made where the data is not.
        return f"the share of trained tokens is not known here: {error.what}"
    return (
        f"{found.trained_share:.0%} of the tokens are trained on and "
        f"{found.padding_share(config.seq_len):.0%} of the sequences is padding, by the first "
        f"{found.num_rows} rows"
    )
