"""`shardwise init`: five questions, then a commented run.yaml with its plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Annotated, TypeVar

import typer

from shardwise.cli.named_run import Amount, ModelName, read_amount
from shardwise.cli.new_file import validate_new_yaml, write_new_file
from shardwise.errors import UserError
from shardwise.facts.probe import probe_gpus

T = TypeVar("T")
_MODEL = "llama-3.1-8b"
_CLUSTER = "8xH100"


def init(
    dest: Annotated[Path, typer.Argument(help="The new file.")] = Path("run.yaml"),
    model: ModelName = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="NODESxGPUSxKIND, such as 8xH100, or local.", show_default=False),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="full, lora or qlora.", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A file, directory or glob; stdlib or synthetic.", show_default=False),
    ] = None,
    tokens: Amount = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Take what is usual, unasked.")] = False,
) -> None:
    """Write a commented run.yaml with its plan, from five answers. Options answer beforehand.

    \b
    Examples:
      shardwise init
      shardwise init --model qwen3-8b --cluster 8xH100 --method lora --yes
    Next: shardwise plan run.yaml
    """
    from shardwise.cli.starter import (
        Answers,
        make_starter,
        plan_lines,
        validate_cluster,
        validate_data,
        validate_method,
        validate_model,
        validate_template,
    )

    validate_new_yaml(dest)
    here = "local" if probe_gpus(os.environ) else _CLUSTER
    answers = Answers(
        model=_answer("1/5  Which model? A name of `shardwise config ls`, a hub id or a directory",
                      model, _MODEL, validate_model, unasked=yes),
        cluster=_answer("2/5  On which devices? 8xH100, 4x8xH100, 1xRTX-4090, 2xCPU or local",
                        cluster, here, validate_cluster, unasked=yes),
        method=_answer("3/5  What is trained? full (all weights), lora or qlora (adapters)",
                       method, "full", validate_method, unasked=yes),
        data=_answer("4/5  On which data? A file, a directory, a glob, or synthetic (random)",
                     data, "synthetic", validate_data, unasked=yes),
        tokens=tokens or _answer("5/5  On how many tokens in all? Such as 500M or 15B",
                                 None, "1B", read_amount, unasked=yes),
    )  # fmt: skip
    validate_template(answers)
    starter = make_starter(answers)
    write_new_file(dest, starter.text)
    typer.echo(f"wrote {dest}")
    for line in plan_lines(starter.plan):
        typer.echo(f"  {line}")
    for note in starter.notes:
        typer.echo(f"  note: {note}")
    typer.echo(f"next: shardwise plan {quote(str(dest))}   (every choice and its reason)")


def _answer(
    question: str, given: str | None, usual: str, read: Callable[[str], T], *, unasked: bool
) -> T:
    """What was given, else what is usual, else what the user says; a wrong word is asked again."""
    if given is not None:
        return read(given)
    if unasked:
        return read(usual)

    while True:
        try:
            return read(typer.prompt(question, default=usual))
        except UserError as error:
            typer.echo(str(error))
        except typer.Abort:
            raise UserError(
                "not all questions were answered, and nothing was written",
                fix="answer them, or take what is usual: shardwise init --yes",
            ) from None
