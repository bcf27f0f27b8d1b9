"""`shardwise generate`: what a trained model says."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.find_run import run_or_name
from shardwise.cli.quiet import quieten_transformers
from shardwise.errors import UserError, printable

if TYPE_CHECKING:
    from shardwise.generate.answer import Answer

RunOrExport = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Run directory or its name, or an export.", parser=run_or_name
    ),
]


def generate(  # noqa: PLR0913  (each is an option)
    place: RunOrExport,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts, each answered by itself.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A file with one prompt on each line.")] = None,
    step: Annotated[int | None, typer.Option(help="Step to load; else the newest.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint with the lowest held-out loss.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token; else tokens are drawn.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest of this share.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts that are answered at once.")] = 16,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on with the prompt as it is, without a template.")
    ] = False,
    code: Annotated[
        Path | None,
        typer.Option(help="Directory of the model's own code, which you trust and which is run."),
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Directory of the weights under adapters, if it was moved.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each answer.")] = False,
) -> None:
    """Answer prompts with a checkpoint or an exported model, on one device.

    A model that was trained on conversations gets each prompt as a user's turn, in its chat
    template. Any other goes on with the text.

    \b
    Examples:
      shardwise generate runs/demo "def main("
      shardwise generate exported "What is FSDP?" --temperature 0.7
      shardwise generate exported --file prompts.txt --json
    Next: shardwise export runs/demo --to exported
    """
    asked = _prompts_of(prompts or [], file)
    import torch

    from shardwise.generate.answer import Sampling, answer_all
    from shardwise.generate.loaded_model import load_speaker

    quieten_transformers()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speaker = load_speaker(place, step, best=best, raw=raw, device=device, code_dir=code, base=base)
    how = Sampling(max_tokens, temperature, top_p, seed)
    for answer in answer_all(speaker, asked, how, batch):
        if as_json:
            typer.echo(json.dumps(asdict(answer)))
        else:
            _tell(answer, with_prompt=len(asked) > 1)


def _tell(answer: Answer, *, with_prompt: bool) -> None:
    if with_prompt:
        typer.echo(f"> {printable(answer.prompt)}")
    # Text of a model must not steer the terminal.
    typer.echo("\n".join(printable(line) for line in answer.text.split("\n")))


def _prompts_of(prompts: list[str], file: Path | None) -> list[str]:
    """The prompts of the command line, then those of the file. There must be one."""
    asked = [*prompts, *([] if file is None else _lines_of(file))]
    if not asked:
        raise UserError(
            "no prompt is given", fix='write one: `shardwise generate RUN "PROMPT"`, or --file FILE'
        )
    return asked


def _lines_of(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the prompts of {file} cannot be read",
            why=str(error),
            fix="name a text file with one prompt on each line: --file FILE",
        ) from error
    return [line for line in text.splitlines() if line.strip()]
