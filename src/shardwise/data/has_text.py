"""Whether there is text to train on, found out without reading much of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.config.mixed_datasets import Dataset, read_datasets
from shardwise.config.schema import DataConfig
from shardwise.data.bad_records import FaultBudget
from shardwise.data.examples import nothing_left, read_examples
from shardwise.data.paths import find_files, readable_data
from shardwise.data.sources import MAX_TEXT_BYTES, read_documents, too_large
from shardwise.data.template import load_chat_template
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import UserError
from shardwise.files import open_file


def validate_text(config: DataConfig) -> None:
    """Raise where `data.path` or `data.field` names nothing that can be read and trained on.

    A source of records is read up to its first text. A text file is one document however large it
    is, so it is only opened.
    """
    if config.source == "synthetic":
        return
    for each in read_datasets(config):
        with of_dataset(each), readable_data():
            _validate_dataset(each.data)


@contextmanager
def of_dataset(dataset: Dataset) -> Iterator[None]:
    """Inside, errors name the dataset, and the settings that a user writes for it."""
    try:
        yield
    except UserError as error:
        if not dataset.name:
            raise
        what, why, fix = (_renamed(text, dataset) for text in (error.what, error.why, error.fix))
        raise UserError(f"{dataset.name}: {what}", why=why, fix=fix, code=error.code) from error


def _renamed(text: str, dataset: Dataset) -> str:
    for name, own in dataset.settings.items():
        text = re.sub(rf"\b{re.escape(name)}\b", own, text)
    return text


def _validate_dataset(config: DataConfig) -> None:
    # Conversations are read with their tokenizer, by `validate_conversations`.
    if config.source == "text" or (config.format != "text" and config.source != "datasets"):
        _validate_files(config)
    elif config.format == "text":
        _validate_first_record(config)


def validate_conversations(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Raise where no row becomes an example; rows are read up to the first that does."""
    template = load_chat_template(tokenizer, config.chat_template)
    for each in read_datasets(config):
        faults = FaultBudget(config.max_corrupt)
        with of_dataset(each):
            if next(read_examples(each.data, template, faults.skip_record), None) is None:
                raise nothing_left(each.data, faults.named)


def _validate_files(config: DataConfig) -> None:
    files = find_files(config)
    for path in files:
        with open_file(path) as file:
            is_large = os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES
        if is_large and config.source == "text":
            raise too_large(path)
    if not any(path.stat().st_size for path in files):
        raise UserError(
            f"the files of data.path are empty: {files[0]}",
            fix="name files with text: data.path=FILES",
        )


def _validate_first_record(config: DataConfig) -> None:
    faults = FaultBudget(config.max_corrupt)
    if next(read_documents(config, faults), None) is not None:
        return
    raise UserError(
        f"data.source={config.source} has no text",
        why="; ".join(faults.named) or "every record is empty",
        fix=faults.fix or "name files with text: data.path=FILES",
    )
