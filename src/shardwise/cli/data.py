"""`shardwise data`: what rows of conversations become as tokens."""

from __future__ import annotations

import os
import sys
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.config.load import load_config
from shardwise.config.mixed_datasets import datasets_of
from shardwise.errors import UserError, printable

if TYPE_CHECKING:
    from shardwise.config.schema import DataConfig, ModelConfig, RunConfig
    from shardwise.data.masking import Example
    from shardwise.data.survey import Survey
    from shardwise.data.template import ChatTemplate

app = typer.Typer(
    name="data",
    help="What rows of conversations become as tokens.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


# Unknown options reach load_config, which answers `--data.seq_len=1` with "write data.seq_len=1".
@app.command("show", context_settings={"ignore_unknown_options": True})
def show(
    config: Annotated[str, typer.Argument(help="YAML, TOML or JSON file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes, such as data.seq_len=4096.", show_default=False),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Print so many conversations.")
    ] = 3,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Read so many rows at most; unset: all.")
    ] = None,
) -> None:
    """Render conversations with the chat template, and show which tokens are trained on.

    Of a mixture it also shows the share of each dataset, and how often the run reads it.

    These tokens are green on a terminal, and in ⟦brackets⟧ elsewhere or where NO_COLOR is set.

    \b
    Examples:
      shardwise data show run.yaml
      shardwise data show run.yaml data.seq_len=4096 --samples 10
    Next: shardwise train run.yaml
    """
    chosen = load_config(config, overrides or [])
    if chosen.data.mixture:
        _show_shares(chosen)
    if chosen.data.format == "text" and chosen.data.mixture:
        return
    for each in datasets_of(chosen.data):
        if each.name:
            typer.echo(f"dataset {printable(each.name)}")
        _show_dataset(each.data, chosen.model, samples, rows)


def _show_shares(config: RunConfig) -> None:
    from shardwise.cli.show import run_of, show_mixture
    from shardwise.launch.prepare import choose_plan

    show_mixture(run_of(choose_plan(config)))


def _show_dataset(data: DataConfig, model: ModelConfig, samples: int, rows: int | None) -> None:
    from shardwise.data.survey import survey_examples
    from shardwise.data.template import load_chat_template
    from shardwise.data.tokenizer import load_tokenizer

    if data.format == "text":
        raise UserError(
            "data.format=text has no mask to show",
            why="all tokens of a text are trained on",
            fix="write data.format=auto for conversations",
        )
    tokenizer = load_tokenizer(data.tokenizer, model.name, revision=model.revision)
    template = load_chat_template(tokenizer, data.chat_template)
    survey = survey_examples(data, template, num_samples=samples, max_rows=rows)
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for example in chain.from_iterable(survey.samples):
        side = ""
        if data.has_preferences:
            names = ("rejected", "chosen") if data.format == "pairs" else ("false", "true")
            side = f", {names[example.is_preferred]}"
        _show_example(example, side, template, in_colour)
    _show_counts(survey, data)


def _show_example(example: Example, side: str, template: ChatTemplate, in_colour: bool) -> None:
    trained = f"{int(example.mask.sum())} of {len(example.ids)} tokens are trained on"
    cut = ", cut" if example.is_cut else ""
    typer.echo(f"{printable(example.document)}{side}: {trained}{cut}")
    typer.echo("".join(_pieces(example, template, in_colour)) + "\n")


def _pieces(example: Example, template: ChatTemplate, in_colour: bool) -> list[str]:
    """The text in runs of tokens that are trained on or not."""
    import numpy as np

    edges = np.flatnonzero(np.diff(example.mask)) + 1
    pieces = []
    for ids, mask in zip(np.split(example.ids, edges), np.split(example.mask, edges), strict=True):
        # Text of a file must not steer the terminal.
        text = "\n".join(printable(line) for line in template.decode(ids).split("\n"))
        if not mask[0]:
            pieces.append(text)
        else:
            pieces.append(typer.style(text, fg="green") if in_colour else f"⟦{text}⟧")
    return pieces


def _show_counts(survey: Survey, data: DataConfig) -> None:
    from shardwise.cli.show import show_table

    seq_len = data.seq_len
    show_table(
        [
            (f"{data.unit}s", f"{survey.num_conversations} of {survey.num_rows} rows"),
            (
                "tokens",
                f"{survey.num_tokens}, at most {max(survey.lengths)} in one {data.unit} "
                f"(data.seq_len {seq_len})",
            ),
            ("trained on", f"{survey.num_trained_tokens} tokens, {survey.trained_share:.1%}"),
            (
                "sequences",
                f"{survey.num_windows}, of which {survey.padding_share(seq_len):.1%} is padding",
            ),
            ("cut", f"{survey.num_cut} to data.seq_len, which keep their answers"),
            ("skipped", f"{survey.skipped.counts.total()} rows"),
        ]
    )
    for reason, count in survey.skipped.counts.most_common():
        typer.echo(f"    {count} x {printable(reason)}")
        for name in survey.skipped.named[reason]:
            typer.echo(f"      {printable(name)}")
