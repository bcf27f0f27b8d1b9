"""`shardwise export`: a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    """What weights may be cast to."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Format(StrEnum):
    """What weights may be written as."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


def export(  # noqa: PLR0913  (each is an option)
    run: Annotated[Path, typer.Argument(help="Run directory, or one checkpoint in it.")],
    to: Annotated[Path, typer.Option(help="Directory to make; absent or empty.")],
    step: Annotated[int | None, typer.Option(help="Step to export; else the newest.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Cast weights; else they stay as they were saved.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "5GB",
    layout: Annotated[
        Format, typer.Option("--format", help="safetensors, or one pytorch_model.bin.")
    ] = Format.SAFETENSORS,
    code: Annotated[
        Path | None,
        typer.Option(help="Directory of the model's own code, which you trust and which is run."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Refuse checkpoints that this key file did not sign.")
    ] = None,
) -> None:
    """Write a checkpoint as a directory that from_pretrained loads. No GPU and no ranks needed.

    \b
    Examples:
      shardwise export runs/demo --to exported
      shardwise export runs/demo --to exported --step 1000 --dtype bf16
      shardwise export runs/demo --to exported --key signing.key
    Next: AutoModelForCausalLM.from_pretrained("exported")
    """
    from shardwise.checkpoint.read import find_checkpoint, verify_checkpoint
    from shardwise.checkpoint.signature import read_key
    from shardwise.errors import UserError

    if code is not None and not (code / "config.json").is_file():
        raise UserError(
            f"{code} is not the directory of a model",
            why="it has no config.json",
            fix="name the directory of the model, with config.json and its .py files: --code DIR",
        )
    path = find_checkpoint(run, step)
    _quieten_transformers()
    import torch

    from shardwise.checkpoint.export import export_checkpoint
    from shardwise.checkpoint.export_target import validate_target
    from shardwise.checkpoint.exporter import Exporter
    from shardwise.units import format_bytes

    validate_target(to)
    dtypes = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}
    checkpoint = verify_checkpoint(path, None if key is None else read_key(key))
    with _progress() as (start, advance):
        exporter = Exporter(checkpoint, dtypes[dtype] if dtype else None, advance, code)
        start(exporter.num_bytes)
        done = export_checkpoint(exporter, to, layout=layout.value, max_shard_size=max_shard_size)
    typer.echo(f"{path} -> {to}: {done.num_files} files, {format_bytes(done.num_bytes)} of weights")
    for note in done.notes:
        typer.echo(note)


def _quieten_transformers() -> None:
    """Silence its notes on configurations, which are for people who write code with it."""
    from transformers.utils import logging

    logging.set_verbosity_error()


@contextmanager
def _progress() -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """`start(total)` and `advance(num_bytes)`: a bar for a person, nothing for a file."""
    if not sys.stderr.isatty():
        yield (lambda total: None), (lambda num_bytes: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("export", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("export", total=None)
        yield (
            lambda total: bar.update(task, total=total),
            lambda num_bytes: bar.advance(task, num_bytes),
        )
