"""Held-out data: a share of the documents, or files and splits of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.config.rule import Rule
from shardwise.config.schema import DataConfig, RunConfig
from shardwise.config.suffixes import source_of_file

_WITH_PATH = ("text", "jsonl", "parquet", "datasets")


def has_held_out(data: DataConfig) -> bool:
    """Whether anything is held out."""
    return data.eval_fraction > 0 or _is_apart(data)


def held_out_of(data: DataConfig) -> DataConfig | None:
    """The section that reads what is held out as other sections read what is trained on; None
    where it is a share of the documents, or nothing."""
    if not _is_apart(data):
        return None
    return replace(
        data,
        mixture={},
        source=_source_of(data),
        path=data.path if data.eval_path is None else data.eval_path,
        split=data.eval_split or data.split,
        eval_path=None,
        eval_split=None,
        eval_fraction=0.0,
    )


def _is_apart(data: DataConfig) -> bool:
    return data.eval_path is not None or data.eval_split is not None


def _source_of(data: DataConfig) -> Any:
    """The source of the training data, or what the file's name tells where that reads no path."""
    if not data.mixture and data.source in _WITH_PATH:
        return data.source
    return source_of_file(data.eval_path) if isinstance(data.eval_path, str) else None


def _is_other_data(config: RunConfig) -> bool:
    own = held_out_of(config.data)
    return own is None or (own.path, own.split) != (config.data.path, config.data.split)


HELD_OUT_RULES: tuple[Rule, ...] = (
    Rule(
        "held-out-once",
        "data.eval_fraction",
        lambda c: c.data.eval_fraction == 0 or not _is_apart(c.data),
        "data.eval_path or data.eval_split names what is held out",
        "leave data.eval_fraction out, or leave data.eval_path and data.eval_split out",
    ),
    Rule(
        "held-out-is-read",
        "data.eval_path",
        lambda c: not _is_apart(c.data) or _source_of(c.data) is not None,
        "its name does not tell how it is read, and data.source={c.data.source} reads no files",
        "name one file by its suffix, such as data.eval_path=held-out.jsonl (or .txt, .parquet)",
    ),
    Rule(
        "splits-are-of-datasets",
        "data.eval_split",
        lambda c: c.data.eval_split is None or c.data.source == "datasets",
        "data.source={c.data.source} has no splits",
        "leave data.eval_split out, or write data.source=datasets",
    ),
    Rule(
        "held-out-is-other-data",
        "data.eval_path",
        lambda c: bool(c.data.mixture) or _is_other_data(c),
        "that is what is trained on, so the loss would not be of other text",
        "name other data, or leave data.eval_path out and write data.eval_fraction=0.02",
    ),
    Rule(
        "answers-are-held-out-by-share",
        "data.eval_path",
        lambda c: not _is_apart(c.data) or not c.data.has_preferences,
        "data.format={c.data.format} has a reference for the answers of data.path alone",
        "leave data.eval_path out, and write data.eval_fraction=0.02",
    ),
)
