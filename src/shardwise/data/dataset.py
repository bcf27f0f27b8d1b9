"""A Hugging Face dataset: saved in a directory or named on the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.config.schema import DataConfig
from shardwise.data.conversation import ROW_KEYS
from shardwise.data.paths import named_paths
from shardwise.errors import UserError, brief
from shardwise.files import user_path


def open_dataset(config: DataConfig) -> Any:
    """The one split, memory-mapped by the datasets library: the text column alone, or those columns
    of conversations that it has."""
    path = dataset_path(config)
    dataset = _load(path, config)
    if config.format != "text":
        found = [name for name in dataset.column_names if name in ROW_KEYS]
        # A dataset without columns would have no rows that could be named.
        return dataset.select_columns(found) if found else dataset
    if config.field not in dataset.column_names:
        raise UserError(
            f"dataset {path} has no column {config.field!r}",
            why=f"its columns are {', '.join(dataset.column_names)}",
            fix=f"write the one that holds the text: {_columns(dataset.column_names)}",
        )
    return dataset.select_columns([config.field])


def dataset_rows(config: DataConfig) -> Iterator[Any]:
    """The rows in their order."""
    rows = iter(open_dataset(config))
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise _unreadable(dataset_path(config), error) from error
        yield row


def dataset_path(config: DataConfig) -> str:
    """The one directory or hub id of the source."""
    paths = named_paths(config)
    if len(paths) > 1:
        raise UserError(
            f"data.source datasets reads one dataset, data.path names {len(paths)}",
            fix="write data.path=DIR with one directory, or one hub id",
        )
    return paths[0]


def dataset_files(dataset: Any) -> list[Path]:
    """The files that hold the rows."""
    return [Path(file["filename"]) for file in dataset.cache_files]


def _load(path: str, config: DataConfig) -> Any:
    # Imported here: it takes seconds that other sources need not spend.
    import datasets

    directory = user_path(path)
    _validate_plain(directory)
    try:
        if not _was_saved_to(directory):
            location = str(directory) if directory.is_dir() else path
            return datasets.load_dataset(location, config.name, split=config.split)
        saved = datasets.load_from_disk(str(directory))
    except Exception as error:
        raise _unreadable(path, error) from error
    return _choose_split(saved, path, config.split) if isinstance(saved, dict) else saved


def _validate_plain(directory: Path) -> None:
    """Raise for a pipe or a device: the library opens every file that it finds, and would wait for
    a pipe forever."""
    for path in directory.rglob("*"):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(
                f"dataset {directory} holds {path}, which is no plain file",
                fix="remove it, or name another directory: data.path=DIR",
            )


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(
        f"dataset {path} cannot be loaded",
        why=brief(error),
        fix="check data.path, data.name and data.split; a machine without network needs "
        "data.path=DIR that Dataset.save_to_disk made",
    )


def _was_saved_to(directory: Path) -> bool:
    return any((directory / file).is_file() for file in ("state.json", "dataset_dict.json"))


def _choose_split(splits: dict[str, Any], path: str, split: str) -> Any:
    if split not in splits:
        raise UserError(
            f"dataset {path} has no split {split!r}",
            why=f"its splits are {', '.join(splits)}",
            fix=f"write {', or '.join(f'data.split={name}' for name in splits)}",
        )
    return splits[split]


def _columns(names: Sequence[str]) -> str:
    return ", or ".join(f"data.field={name}" for name in names) or "the dataset has no columns"
