"""`shardwise export`: a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardwise.cli.find_run import run_or_name
from shardwise.cli.quiet import quieten_transformers

if TYPE_CHECKING:
    import torch

    from shardwise.checkpoint.export_model import Exported
    from shardwise.checkpoint.read import VerifiedCheckpoint


class Dtype(StrEnum):
    """What weights may be cast to."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Format(StrEnum):
    """What weights may be written as."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


_SHARD_SIZE = "5GB"

RunOrCheckpoint = Annotated[
    Path,
    typer.Argument(help="Run directory or its name, or one checkpoint.", parser=run_or_name),
]
ModelCode = Annotated[
    Path | None,
    typer.Option(help="Directory of the model's own code, which you trust and which is run."),
]
KeyFile = Annotated[
    Path | None, typer.Option(help="Refuse checkpoints that this key file did not sign.")
]


def export(  # noqa: PLR0913  (each is an option)
    run: RunOrCheckpoint,
    to: Annotated[Path, typer.Option(help="Directory to make; absent or empty.")],
    step: Annotated[int | None, typer.Option(help="Step to export; else the newest.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint with the lowest held-out loss.")
    ] = False,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Cast weights; else they stay as they were saved.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = _SHARD_SIZE,
    layout: Annotated[
        Format, typer.Option("--format", help="safetensors, or one pytorch_model.bin.")
    ] = Format.SAFETENSORS,
    code: ModelCode = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add adapters to the weights that they belong to.")
    ] = False,
    base: Annotated[
        Path | None, typer.Option(help="Directory of those weights, if it was moved.")
    ] = None,
    key: KeyFile = None,
) -> None:
    """Write a checkpoint as a directory that from_pretrained loads. No GPU and no ranks needed.

    A checkpoint of adapters becomes a directory that PEFT loads, or with --merge a whole model.

    \b
    Examples:
      shardwise export runs/demo --to exported
      shardwise export runs/demo --to exported --step 1000 --dtype bf16
      shardwise export runs/demo --to exported --best
      shardwise export runs/demo --to exported --key signing.key
      shardwise export runs/lora --to merged --merge
    Next: AutoModelForCausalLM.from_pretrained("exported")
    """
    from shardwise.checkpoint.read import find_checkpoint, verify_checkpoint
    from shardwise.checkpoint.signature import read_key

    if code is not None:
        _validate_code(code)
    path = find_checkpoint(run, step, best=best)
    quieten_transformers()
    from shardwise.checkpoint.export_target import validate_target
    from shardwise.units import format_bytes

    validate_target(to)
    wanted = _torch_dtype(dtype) if dtype else None
    checkpoint = verify_checkpoint(path, None if key is None else read_key(key))
    if checkpoint.plan.decided.adapter == "none":
        _refuse_merge(merge=merge, base=base)
        done = _write_model(checkpoint, to, wanted, code, (layout.value, max_shard_size))
    else:
        _refuse_layout(path, layout, max_shard_size)
        done = _write_adapters(checkpoint, to, wanted, code, merge=merge, base=base)
    typer.echo(f"{path} -> {to}: {done.num_files} files, {format_bytes(done.num_bytes)} of weights")
    for note in done.notes:
        typer.echo(note)


def _validate_code(code: Path) -> None:
    from shardwise.errors import UserError

    if not (code / "config.json").is_file():
        raise UserError(
            f"{code} is not the directory of a model",
            why="it has no config.json",
            fix="name the directory of the model, with config.json and its .py files: --code DIR",
        )


def _torch_dtype(dtype: Dtype) -> torch.dtype:
    import torch

    dtypes = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}
    return dtypes[dtype]


def _write_model(
    checkpoint: VerifiedCheckpoint,
    to: Path,
    dtype: torch.dtype | None,
    code: Path | None,
    layout: tuple[Literal["safetensors", "torch"], str],
) -> Exported:
    from shardwise.checkpoint.export_model import export_checkpoint
    from shardwise.checkpoint.exporter import Exporter

    with _progress() as (start, advance):
        exporter = Exporter(checkpoint, dtype, advance, code)
        start(exporter.num_bytes)
        return export_checkpoint(exporter, to, layout=layout[0], max_shard_size=layout[1])


def _write_adapters(
    checkpoint: VerifiedCheckpoint,
    to: Path,
    dtype: torch.dtype | None,
    code: Path | None,
    *,
    merge: bool,
    base: Path | None,
) -> Exported:
    from shardwise.checkpoint.adapter_export import export_adapters
    from shardwise.checkpoint.merge import Merger
    from shardwise.errors import UserError

    if not merge:
        if base is not None:
            raise UserError(
                f"--base {base} is for --merge alone",
                why="adapters are written without the weights that they belong to",
                fix="write --merge, or leave --base out",
            )
        return export_adapters(checkpoint, to, dtype, code)
    with _progress() as (start, advance):
        merger = Merger(checkpoint, base, code)
        start(merger.num_bytes)
        return merger.write(to, dtype, advance)


def _refuse_merge(*, merge: bool, base: Path | None) -> None:
    from shardwise.errors import UserError

    if merge or base is not None:
        raise UserError(
            f"{'--merge' if merge else '--base'} is for checkpoints of adapters",
            why="this checkpoint holds a whole model",
            fix="leave --merge and --base out",
        )


def _refuse_layout(path: Path, layout: Format, max_shard_size: str) -> None:
    from shardwise.errors import UserError

    if layout is Format.TORCH or max_shard_size != _SHARD_SIZE:
        raise UserError(
            f"{path} holds adapters, and --format and --max-shard-size are for whole models",
            why="adapters are one safetensors file; merged weights have the files of their base",
            fix="leave --format and --max-shard-size out",
        )


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
