"""The datasets that a run reads: one, or several that are mixed by weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from shardwise.config.held_out import held_out_of
from shardwise.config.rule import Rule
from shardwise.config.schema import DataConfig, RunConfig
from shardwise.config.suffixes import source_of_file

SOURCES = ("text", "jsonl", "parquet", "datasets", "stdlib")
# What a dataset of a mixture may say for itself, besides its weight.
_OWN = ("source", "path", "field", "name", "split")
_EXAMPLE = "data.mixture={web: {path: web.jsonl, weight: 0.7}, code: {path: code.txt, weight: 0.3}}"


@dataclass(frozen=True, slots=True)
class Dataset:
    """One dataset of a run."""

    name: str
    """What the mixture calls it; empty where it is the only one."""

    share: float
    """Of the sequences that are read, 0 to 1."""

    data: DataConfig
    """The section with its own source in place of the mixture."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """What a user writes for the settings of this section, where that is something else."""


def datasets_of(data: DataConfig) -> tuple[Dataset, ...]:
    """All datasets of a section whose rules hold. Without a mixture there is one."""
    if not data.mixture:
        return (Dataset("", 1.0, data),)
    total = sum(each["weight"] for each in data.mixture.values())
    return tuple(
        Dataset(name, said["weight"] / total, _section_of(data, said), _settings_of(name))
        for name, said in data.mixture.items()
    )


def read_datasets(data: DataConfig) -> Iterator[Dataset]:
    """All that are trained on, and what is held out where it has data of its own."""
    yield from datasets_of(data)
    if (held_out := held_out_of(data)) is not None:
        names = {"data.path": "data.eval_path", "data.split": "data.eval_split"}
        yield Dataset("held-out", 0.0, held_out, names)


def _settings_of(name: str) -> dict[str, str]:
    return {f"data.{key}": f"data.mixture.{name}.{key}" for key in _OWN}


def _section_of(data: DataConfig, said: dict[str, Any]) -> DataConfig:
    own = {key: said[key] for key in _OWN if key in said}
    return replace(data, mixture={}, **{"source": _source_of(said), **own})


def _source_of(said: dict[str, Any]) -> Any:
    """The source that is given, or that the file's name tells; None where neither does."""
    path = said.get("path")
    return said.get("source") or (source_of_file(path) if isinstance(path, str) else None)


def _faults(config: RunConfig) -> Iterator[str]:
    """What is wrong with the datasets of a mixture, one by one."""
    for name, said in config.data.mixture.items():
        yield from (f"{name}: {fault}" for fault in _faults_of(said, config.data.format))


def _faults_of(said: dict[str, Any], form: str) -> Iterator[str]:
    weight, source, path = said.get("weight"), _source_of(said), said.get("path")
    if unknown := [key for key in said if key not in ("weight", *_OWN)]:
        yield f"unknown key `{unknown[0]}`; it takes weight, {', '.join(_OWN)}"
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight <= 0:
        yield f"its weight is {weight}, which is no number above 0"
    if source is None and path is not None:
        yield f"{path} does not tell its source: add source, one of {', '.join(SOURCES)}"
    elif source not in SOURCES:
        yield f"its source is {source}, which is none of {', '.join(SOURCES)}"
    elif source != "stdlib" and not path:
        yield "it has no path"
    elif source == "stdlib" and path is not None:
        yield "stdlib reads no path"
    elif form != "text" and source in ("text", "stdlib"):
        yield f"{source} has no records, which data.format={form} needs"
    texts = path if isinstance(path, list) else [path]
    if any(text is not None and not isinstance(text, str) for text in texts):
        yield "its path is no text or list of texts"
    if any(not isinstance(said.get(key, ""), str) for key in ("source", "field", "name", "split")):
        yield "source, field, name and split are texts"


def _without(setting: str, needs: str, *usual: object) -> Rule:
    """A row for a setting that does not go with a mixture."""
    read = attrgetter(setting)
    return Rule(
        f"{setting}-without-mixture",
        setting,
        lambda c: not c.data.mixture or read(c) in usual,
        f"data.mixture is given, and {needs}",
        f"leave {setting} out, or leave data.mixture out",
    )


MIXTURE_RULES: tuple[Rule, ...] = (
    Rule(
        "mixture-is-whole",
        "data.mixture",
        lambda c: next(_faults(c), None) is None,
        "each dataset needs a weight above 0, and a source or a path that tells it",
        lambda c: f"mend {'; '.join(_faults(c))}. An example: '{_EXAMPLE}'",
    ),
    _without("data.source", "each of its datasets has a source of its own", "stdlib"),
    _without("data.path", "each of its datasets has a path of its own", None),
    _without("data.group_lengths", "lengths are sorted within one dataset", False),
    _without("preference.objective", "answers are numbered within one dataset", "none"),
)
