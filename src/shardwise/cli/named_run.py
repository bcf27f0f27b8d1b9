"""A run that is named by options of a command, with a file or without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shardwise.errors import UserError
from shardwise.units import parse_count


def read_speed(text: str) -> float:
    """Tokens per second as people and plans write them."""
    try:
        return parse_count(text)
    except ValueError:
        raise UserError(
            f"{text!r} is no number of tokens per second",
            fix="write --tokens-per-s NUMBER, such as 6325 or 10.7k",
        ) from None


def read_amount(text: str) -> float:
    """A number of tokens as people write it."""
    try:
        return parse_count(text)
    except ValueError:
        raise UserError(
            f"{text!r} is no number of tokens", fix="write --tokens NUMBER, such as 15B"
        ) from None


ConfigFile = Annotated[
    str | None, typer.Argument(help="YAML, TOML or JSON file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes, such as optim.lr=3e-4.", show_default=False)
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="A model: a preset, a hub id or a directory.", show_default=False),
]
SeqLen = Annotated[
    int | None, typer.Option("--seq", min=1, help="Tokens of a sequence.", show_default=False)
]
MicroBatch = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences in one forward pass of a rank.", show_default=False),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences in one step of all ranks.", show_default=False),
]
GpuTflops = Annotated[
    float | None,
    typer.Option(help="Of a GPU that is not in the catalogue: TFLOP/s.", show_default=False),
]
GpuGib = Annotated[float | None, typer.Option(help="Its memory in GiB.", show_default=False)]
GpuGbps = Annotated[float | None, typer.Option(help="GB/s of its memory.", show_default=False)]
Amount = Annotated[
    float | None,
    typer.Option(
        help="Tokens, such as 15B.", parser=read_amount, metavar="COUNT", show_default=False
    ),
]


def split_words(
    config: str | None, overrides: list[str] | None, model: str | None
) -> tuple[str | None, list[str]]:
    """(file, changes). Where `--model` stands in for a file, the first word is a change."""
    words = overrides or []
    if model is not None and config is not None and "=" in config and not Path(config).exists():
        return None, [config, *words]
    return config, words


def changes_of(
    *,
    model: str | None,
    seq: int | None,
    micro_batch: int | None,
    global_batch: int | None,
    has_file: bool,
) -> Iterator[str]:
    """The changes that these options stand for.

    Without a file nothing is trained, so no data is named, and a hub id of a preset's model is
    that preset: its shape is known here.
    """
    from shardwise.facts.config_source import preset_named

    if model is not None:
        yield f"model.name={model if has_file else preset_named(model) or model}"
        if not has_file:
            yield "data.source=synthetic"
    named = {
        "data.seq_len": seq,
        "train.micro_batch": micro_batch,
        "train.global_batch": global_batch,
    }
    yield from (f"{setting}={value}" for setting, value in named.items() if value is not None)


def changes_of_gpu(tflops: float | None, gib: float | None, gbps: float | None) -> list[str]:
    """The changes that describe a GPU which the catalogue does not know."""
    given = {
        "--gpu-tflops": ("cluster.peak_tflops", tflops),
        "--gpu-gib": ("cluster.gpu_gib", gib),
        "--gpu-gbps": ("cluster.gpu_gbps", gbps),
    }
    missing = [option for option, (_, value) in given.items() if value is None]
    if len(missing) == len(given):
        return []
    if missing:
        raise UserError(
            f"a GPU is described without {' and '.join(missing)}",
            why="--gpu-tflops, --gpu-gib and --gpu-gbps describe it together",
            fix=f"write {' '.join(f'{option} {_EXAMPLES[option]}' for option in missing)}",
        )
    return [f"{setting}={value}" for setting, value in given.values()]


_EXAMPLES = {"--gpu-tflops": "400", "--gpu-gib": "96", "--gpu-gbps": "1600"}
