"""`shardwise checkpoint`: what a run has kept, whether it is whole, and room on the disk."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from shardwise.checkpoint.check import check_checkpoint
from shardwise.checkpoint.store import Checkpoint, Entry, clear_partials, list_entries, prune
from shardwise.errors import ExitCode, UserError
from shardwise.lease.take import hold_run
from shardwise.units import format_bytes, format_duration

app = typer.Typer(
    name="checkpoint",
    help="The checkpoints of a run: list them, verify every byte, make room.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True, slots=True)
class _Judged:
    """A directory of checkpoints in the words of `ls`."""

    entry: Entry
    state: str
    reason: str


Run = Annotated[Path, typer.Argument(help="A run directory, such as runs/demo.")]
_HEADER = ("step", "size", "age", "state", "ranks", "loss", "reason")


@app.command("ls")
def list_checkpoints_of(
    run: Run,
    verify_bytes: Annotated[
        bool, typer.Option("--verify", help="Hash every file: good or damaged, for certain.")
    ] = False,
) -> None:
    """List checkpoints, judged by manifests and file sizes. Exits 5 where one is damaged.

    Whole ones are shown as `not verified`: their bytes are read only with --verify, which shows
    them as `good` or `damaged`.

    \b
    Examples:
      shardwise checkpoint ls runs/demo
      shardwise checkpoint ls runs/demo --verify
    Next: shardwise checkpoint verify runs/demo
    """
    entries = _entries_of(run)
    if not entries:
        typer.echo(f"{run} has no checkpoints yet")
        return
    judged = [_judge(entry, verify_bytes) for entry in entries]
    _echo_table([_HEADER, *map(_row, judged)])
    _refuse_damage(run, [each.entry for each in judged if each.state == "damaged"])


@app.command("verify")
def verify(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Only this one; else all.")] = None,
) -> None:
    """Hash every file of every published checkpoint. Exits 5 where one is damaged.

    \b
    Examples:
      shardwise checkpoint verify runs/demo
      shardwise checkpoint verify runs/demo --step 60
    Next: shardwise train goes on from the newest one that is good.
    """
    published = [entry for entry in _entries_of(run) if entry.is_published]
    chosen = [entry for entry in published if step in (None, entry.step)]
    if step is not None and not chosen:
        steps = ", ".join(str(entry.step) for entry in published)
        raise UserError(
            f"{run} has no checkpoint of step {step}",
            fix=f"write --step {published[-1].step} (there are: {steps})"
            if steps
            else "leave --step out: nothing is saved yet",
        )
    damaged = []
    for entry in chosen:
        problems = _find_problems(entry)
        size = format_bytes(_size_of(entry.path))
        typer.echo(f"step {entry.step}: {'DAMAGED' if problems else f'good, {size}'}")
        for problem in problems:
            typer.echo(f"  {_printable(problem)}")
        if problems:
            damaged.append(entry)
    typer.echo(f"{len(chosen)} verified, {len(damaged)} damaged")
    _refuse_damage(run, damaged)


@app.command("prune")
def prune_run(
    run: Run,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest whole ones stay.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove the oldest whole checkpoints, and what unfinished saves left behind.

    One of those that stay is verified first, so the last good one is never removed. While a job
    uses the run directory, unfinished saves stay: one of them may be its own.

    \b
    Examples:
      shardwise checkpoint prune runs/demo --keep 2 --dry-run
      shardwise checkpoint prune runs/demo --keep 2
    Next: shardwise checkpoint ls runs/demo
    """
    entries = _entries_of(run)
    good = [entry.checkpoint for entry in entries if entry.checkpoint is not None]
    old = {found.path for found in good[:-keep]}
    if old:
        _validate_one_stays(run, good[-keep:])
    partial = {entry.path for entry in entries if entry.state == "partial"}
    sizes = {entry.path: _size_of(entry.path) for entry in entries if entry.path in old | partial}
    if not dry_run:
        prune(run / "checkpoints", keep)
    if partial:
        try:
            # On a full disk the lock finds room only after the old ones are gone.
            with hold_run(run, patience_s=0):
                if not dry_run:
                    clear_partials(run / "checkpoints")
        except UserError as refusal:
            typer.echo(f"unfinished saves stay: {refusal.what}")
            sizes = {path: size for path, size in sizes.items() if path not in partial}
    for path, size in sizes.items():
        typer.echo(f"{'would remove' if dry_run else 'removed'} {path.name}  {format_bytes(size)}")
    total = sum(sizes.values())
    typer.echo(f"{format_bytes(total)} ({total} bytes) {'to return' if dry_run else 'returned'}")


def _entries_of(run: Path) -> list[Entry]:
    if not run.is_dir():
        raise UserError(
            f"there is no run directory {run}",
            fix="name the directory that `shardwise train` printed, such as runs/demo",
        )
    return list_entries(run / "checkpoints")


def _judge(entry: Entry, verify_bytes: bool) -> _Judged:
    if not verify_bytes or not entry.is_published:
        return _Judged(entry, entry.state, entry.reason)
    problems = _find_problems(entry)
    return _Judged(entry, "damaged" if problems else "good", "\n".join(problems))


def _find_problems(entry: Entry) -> list[str]:
    problems = [str(damage) for damage in check_checkpoint(entry.path)]
    return problems or ([entry.reason] if entry.state == "damaged" else [])


def _validate_one_stays(run: Path, kept: list[Checkpoint]) -> None:
    if all(check_checkpoint(found.path) for found in reversed(kept)):
        raise UserError(
            f"nothing was removed: of the {len(kept)} checkpoints that would stay none is whole",
            why="an older one may be the last good one",
            fix=f"see which are damaged: shardwise checkpoint verify {quote(str(run))}",
            code=ExitCode.VERIFY_FAILED,
        )


def _refuse_damage(run: Path, damaged: list[Entry]) -> None:
    if damaged:
        steps = ", ".join(str(entry.step) for entry in damaged)
        raise UserError(
            f"damaged checkpoints in {run}: step {steps}",
            why="their bytes are not those that were written",
            fix="the next `shardwise train` sets them aside and goes on from the newest good one",
            code=ExitCode.VERIFY_FAILED,
        )


def _row(judged: _Judged) -> tuple[str, ...]:
    entry, manifest = judged.entry, judged.entry.manifest
    created = manifest.created if manifest else entry.path.stat().st_mtime
    return (
        str(entry.step),
        format_bytes(_size_of(entry.path)),
        format_duration(time.time() - created),
        judged.state,
        str(manifest.world_size) if manifest else "-",
        f"{manifest.loss:.4f}" if manifest and manifest.loss is not None else "-",
        _printable("; ".join(judged.reason.splitlines())),
    )


def _size_of(directory: Path) -> int:
    return sum(item.lstat().st_size for item in directory.rglob("*") if not item.is_dir())


def _echo_table(rows: Iterable[tuple[str, ...]]) -> None:
    found = list(rows)
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    for row in found:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def _printable(text: str) -> str:
    """Names come from files: nothing in them may steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
