"""Rows of Parquet files: chosen columns, a few rows at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.data.compressed import damaged
from shardwise.errors import UserError
from shardwise.files import open_file

# The number of rows that are decoded at once, so a file of any size takes the memory of so many
# texts.
BATCH_ROWS = 256
BUFFER_BYTES = 1 << 20


def read_column(path: Path, field: str) -> Iterator[object]:
    """The values of one column in the order of the file."""
    with _open_parquet(path) as file:
        _validate_column(path, file.schema_arrow, field)
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[field]):
            yield from batch.column(0).to_pylist()


def read_rows(path: Path, keys: Collection[str]) -> Iterator[dict[str, Any]]:
    """The rows in the order of the file, with those of the columns `keys` that it has."""
    with _open_parquet(path) as file:
        names = [name for name in file.schema_arrow.names if name in keys]
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
            # Without a column a batch does not know how many rows it has.
            yield from batch.to_pylist() if names else ({} for _ in range(batch.num_rows))


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """A file of which a damaged page is an error that names the file."""
    # Imported here: it takes time that other sources need not spend.
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with (
            open_file(path) as stream,
            ParquetFile(
                stream,
                # Reading goes through a small buffer; otherwise whole row groups would be held.
                pre_buffer=False,
                buffer_size=BUFFER_BYTES,
                # Checksums are verified for pages that were written with one.
                page_checksum_verification=True,
            ) as file,
        ):
            yield file
    except pyarrow.ArrowException as error:
        raise damaged(path, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise damaged(path, error) from error


def _validate_column(path: Path, schema: Any, field: str) -> None:
    if field not in schema.names:
        raise UserError(
            f"{path} has no column {field!r}",
            why=f"its columns are {', '.join(schema.names)}",
            fix="name the column that holds the text: data.field=KEY",
        )
    kind = schema.field(field).type
    if str(getattr(kind, "value_type", kind)) not in ("string", "large_string", "string_view"):
        texts = [name for name in schema.names if "string" in str(schema.field(name).type)]
        raise UserError(
            f"column {field!r} of {path} holds {kind}, not text",
            why=f"its columns of text are {', '.join(texts)}" if texts else "no column holds text",
            fix="name the column that holds the text: data.field=KEY",
        )
