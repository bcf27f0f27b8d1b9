"""Whether there is text to train on, found out without reading much of it."""

from __future__ import annotations

import os

from shardwise.config.schema import DataConfig
from shardwise.data.faults import FaultBudget
from shardwise.data.files import find_files
from shardwise.data.sources import MAX_TEXT_BYTES, read_documents, too_large
from shardwise.errors import ExitCode, UserError
from shardwise.files import open_file


def validate_text(config: DataConfig) -> None:
    """Raise where `data.path` or `data.field` names nothing that can be read and trained on.

    A source of records is read up to its first text. A text file is one document however large it
    is, so it is only opened.
    """
    validate_format(config)
    if config.source == "synthetic":
        return
    try:
        if config.source == "text":
            _validate_files(config)
        else:
            _validate_first_record(config)
    except OSError as error:
        raise UserError(
            f"the data cannot be read: {error.strerror}: {error.filename}",
            why="data.path names it",
            fix="see who may read it (ls -l FILES), or name others: data.path=FILES",
            code=ExitCode.ENVIRONMENT,
        ) from error


def check_format(config: DataConfig) -> list[UserError]:
    """What is wrong with training on conversations: their masks do not reach the loss."""
    if config.format == "text":
        return []
    return [
        UserError(
            f"this version does not train on data.format={config.format} yet",
            why="it shows conversations and their masks, but the loss would be computed on all "
            "tokens",
            fix="leave data.format out to train on the text of data.field, or look at the "
            "conversations: `shardwise data show FILE`",
        )
    ]


def validate_format(config: DataConfig) -> None:
    """Raise for conversations."""
    for problem in check_format(config):
        raise problem


def _validate_files(config: DataConfig) -> None:
    files = find_files(config)
    for path in files:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
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
