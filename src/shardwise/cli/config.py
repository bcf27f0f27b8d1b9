"""`shardwise config`: what there is to start from, and what a file may say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from textwrap import fill
from typing import Annotated

import typer

from shardwise.cli.new_file import write_new_file
from shardwise.config.schema_text import (
    TOP_LEVEL,
    FieldDoc,
    describe_fields,
    hint_for_key,
    json_schema,
    markdown_reference,
    section_classes,
)
from shardwise.errors import UserError

EXAMPLES_DIR = Path(__file__).parent.parent / "examples"

app = typer.Typer(
    name="config",
    help="Models and examples to start from, and every setting that a file may hold.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("ls")
def list_presets_and_examples() -> None:
    """List the built-in models and the example files.

    \b
    Example:
      shardwise config ls
    Next: shardwise config cp NAME run.yaml
    """
    typer.echo("models (write `model: NAME`)")
    _echo_table(_describe_models())
    typer.echo("\nexamples (shardwise config cp NAME run.yaml)")
    _echo_table((name, _first_comment(file)) for name, file in _find_examples().items())


@app.command("cp")
def copy_example(
    name: Annotated[str, typer.Argument(help="An example that `shardwise config ls` lists.")],
    dest: Annotated[Path, typer.Argument(help="The new file, or a directory to put it in.")],
) -> None:
    """Copy an example to a new file, for you to change. Nothing is overwritten.

    \b
    Example:
      shardwise config cp NAME run.yaml
    Next: shardwise plan run.yaml
    """
    example = _find_example(name)
    target = dest / example.name if dest.is_dir() else dest
    write_new_file(target, example.read_text(encoding="utf-8"))
    typer.echo(f"wrote {target}\nnext: shardwise plan {quote(str(target))}")


@app.command("schema")
def show_schema(
    field: Annotated[
        str | None, typer.Argument(help="A field (optim.lr) or a section (optim).")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown tables instead of JSON Schema.")
    ] = False,
) -> None:
    """Print the settings: as JSON Schema for editors, as Markdown, or one field's own text.

    \b
    Examples:
      shardwise config schema optim.lr
      shardwise config schema optim
      shardwise config schema > shardwise.schema.json
      shardwise config schema --markdown
    Next: shardwise plan run.yaml optim.lr=1e-4
    """
    if field is not None:
        typer.echo("\n\n".join(map(_explain, _find_fields(field))))
    elif markdown:
        typer.echo(markdown_reference())
    else:
        typer.echo(json.dumps(json_schema(), indent=2))


def _describe_models() -> Iterator[tuple[str, str]]:
    from shardwise.facts.counted import preset_spec
    from shardwise.facts.presets import PRESETS
    from shardwise.units import format_count

    for name in PRESETS:
        spec = preset_spec(name)
        size = format_count(spec.total_params)
        yield name, f"{spec.model_type}, {size} parameters, {spec.num_layers} layers"


def _echo_table(rows: Iterator[tuple[str, str]]) -> None:
    found = list(rows)
    width = max((len(name) for name, _ in found), default=0)
    for name, line in found:
        typer.echo(f"  {name:<{width}}  {line}".rstrip())


def _find_examples() -> dict[str, Path]:
    return {file.stem: file for file in sorted(EXAMPLES_DIR.glob("*.yaml"))}


def _first_comment(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("#")), "")


def _find_example(name: str) -> Path:
    examples = _find_examples()
    stem = name.removesuffix(".yaml")
    if stem in examples:
        return examples[stem]
    near = get_close_matches(stem, examples, n=3, cutoff=0.4)
    raise UserError(
        f"there is no example named {name}",
        fix=f"did you mean {' or '.join(near)}?"
        if near
        else "see what there is: shardwise config ls",
    )


def _find_fields(path: str) -> list[FieldDoc]:
    found = [field for field in describe_fields() if path in (field.path, field.section)]
    if path and found:
        return found
    section, _, name = path.rpartition(".")
    known = section in section_classes()
    raise UserError(
        f"there is no setting named {path}",
        fix=hint_for_key(section, name) if known else hint_for_key(TOP_LEVEL, path.split(".")[0]),
    )


def _explain(field: FieldDoc) -> str:
    said = (field.doc, f"takes: {field.type}", f"default: {field.default}")
    return "\n".join([field.path, *(_indented(text) for text in said)])


def _indented(text: str) -> str:
    return fill(text, 80, initial_indent="  ", subsequent_indent="  ",
                break_long_words=False, break_on_hyphens=False)  # fmt: skip
