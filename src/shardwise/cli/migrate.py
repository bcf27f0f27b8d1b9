"""`shardwise migrate`: a configuration of another tool becomes ours, with a line for every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.new_file import write_new_file
from shardwise.cli.show import show_plan, show_table
from shardwise.config.load import load_config
from shardwise.config.schema_text import show_value
from shardwise.errors import UserError, printable

if TYPE_CHECKING:
    from shardwise.migrate.line import Line

_CELL = 60
OURS, ACCELERATE = "shardwise", "accelerate"
_TITLES = {"assumed": "Assumed: the file does not say, and the tool does so by default"}


def migrate(
    file: Annotated[Path, typer.Argument(help="The other tool's file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="What the file does not say, such as model=NAME cluster=8xH100."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--from", help="The tool, where its keys do not tell.")
    ] = None,
    to: Annotated[
        str, typer.Option("--to", help="`accelerate`: write an Accelerate file of our YAML.")
    ] = OURS,
    out: Annotated[
        Path | None, typer.Option(help="The new file; run.yaml, or accelerate.yaml.")
    ] = None,
) -> None:
    """Write our YAML for a configuration of another tool, and say what became of every key.

    Accelerate (FSDP 1 and 2, DeepSpeed), DeepSpeed, HF TrainingArguments and TRL, axolotl,
    LLaMA-Factory, torchtune and torchtitan. The tool is told by the keys of the file.
    A Python script is read, not run: its calls are listed, and what each becomes.

    \b
    Examples:
      shardwise migrate fsdp.yaml model=llama-3.1-8b cluster=2x8xH100
      shardwise migrate ds_config.json --out run.yaml
      shardwise migrate run.yaml --to accelerate
      shardwise migrate train.py
    Next: shardwise train run.yaml
    """
    if to not in (OURS, ACCELERATE):
        raise UserError(f"--to {to} is not known", fix=f"write --to {ACCELERATE}, or leave it out")
    if to == ACCELERATE:
        _to_accelerate(file, overrides or [], out or Path("accelerate.yaml"))
        return
    if file.suffix.lower() == ".py":
        _point_at_calls(file)
        return
    from shardwise.migrate.migration import migrate_file

    done = migrate_file(file, kind, overrides or [])
    target = out or Path("run.yaml")
    write_new_file(target, done.yaml)
    typer.echo(f"{file}: {done.reader.title}, {num_keys(done.lines)} keys")
    show_lines(done.lines)
    typer.echo(f"wrote {target}")
    _plan(target, done.settings)


def _point_at_calls(file: Path) -> None:
    """A table of the calls of a script. The script is parsed, and never run."""
    from shardwise.migrate.script import read_script

    if not (found := read_script(file)):
        typer.echo(f"{file} calls nothing of FSDP, DeepSpeed, Accelerate or the Trainer")
        return
    typer.echo(f"{file}: what becomes of its calls")
    show_table([(f"line {call.line}", _cell(call.what), printable(call.becomes)) for call in found])
    example = "llama-3.1-8b-8xh100"
    typer.echo(f"next: shardwise config cp {example} run.yaml   (and write the settings there)")


def _to_accelerate(file: Path, overrides: list[str], out: Path) -> None:
    """Plan our file, and write the Accelerate file that runs the plan."""
    from shardwise.launch.prepare import choose_plan
    from shardwise.migrate.to_accelerate import accelerate_lines, accelerate_tree, dump_accelerate

    plan = choose_plan(load_config(file, overrides))
    lines = accelerate_lines(file, plan)
    write_new_file(out, dump_accelerate(accelerate_tree(plan), file))
    typer.echo(f"{file}: shardwise, {num_keys(lines)} keys")
    show_lines(lines, {"assumed": "Planned: the file leaves it to the plan"})
    typer.echo(f"wrote {out}\nnext: accelerate launch --config_file {quote(str(out))} train.py")


def num_keys(lines: Sequence[Line]) -> int:
    """Keys of the file, without what was assumed beside it."""
    return sum(line.outcome.fate != "assumed" for line in lines)


def show_lines(lines: Sequence[Line], titles: Mapping[str, str] = _TITLES) -> None:
    """The table: Mapped, Changed, Dropped, and what the tool does by default."""
    from shardwise.migrate.line import FATES

    for fate in FATES:
        rows = [_row(line) for line in lines if line.outcome.fate == fate]
        if rows:
            typer.echo(titles.get(fate, fate.capitalize()))
            show_table(rows)
    for line in lines:
        if line.outcome.is_other_task:
            told = f"{line.key}: {line.outcome.why}"
            typer.echo(f"warning: the run trains something else: {printable(told)}")


def _row(line: Line) -> tuple[str, str, str]:
    becomes = " ".join(f"{path}={_spell(val)}" for path, val in line.outcome.settings.items())
    return (
        _cell(f"{line.key}: {_spell(line.value)}"),
        _cell(becomes),
        printable(line.outcome.why),
    )


def _spell(value: object) -> str:
    return value if isinstance(value, str) and value else show_value(value)


def _cell(text: str) -> str:
    plain = printable(text)
    return plain if len(plain) <= _CELL else f"{plain[: _CELL - 1]}…"


def _plan(out: Path, settings: dict[str, object]) -> None:
    """Plan the new file, or say what a plan still needs."""
    missing = [
        setting
        for path, setting in (("model.name", "model=NAME"), ("cluster.name", "cluster=8xH100"))
        if path not in settings
    ]
    if missing:
        names = " and ".join(word.partition("=")[0] for word in missing)
        typer.echo(f"no plan yet: the file names no {names}")
        typer.echo(f"next: {join(['shardwise', 'plan', str(out), *missing])}")
        return
    from shardwise.launch.prepare import choose_plan

    show_plan(choose_plan(load_config(out)), 0, None)
    typer.echo(f"next: {join(['shardwise', 'train', str(out)])}")
