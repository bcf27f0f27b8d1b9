"""`shardwise checkpoint`: what a run has kept, whether it is whole, and room on the disk."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from shardwise.checkpoint.audit import check_checkpoint
from shardwise.checkpoint.durable_files import stats_below
from shardwise.checkpoint.manifest import MANIFEST_NAME, Manifest
from shardwise.checkpoint.signature import read_key, sign, why_not_signed
from shardwise.checkpoint.store import (
    Checkpoint,
    Entry,
    best_of,
    clear_partials,
    list_entries,
    remove,
)
from shardwise.cli.checkpoint_verdict import SHOWN, JudgedCheckpoint, as_listed, judge, refuse_bad
from shardwise.cli.find_run import run_or_name
from shardwise.errors import ExitCode, UserError, printable
from shardwise.lease.take import hold_run
from shardwise.units import format_bytes, format_duration

app = typer.Typer(
    name="checkpoint",
    help="The checkpoints of a run: list them, verify every byte, sign them, make room.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


Run = Annotated[
    Path,
    typer.Argument(
        help="A run directory, such as runs/demo, its name, or one checkpoint.", parser=run_or_name
    ),
]
# Rounds of listing, in which every listed checkpoint was removed before it could be read.
_MOST_ROUNDS = 5
_HEADER = ("step", "size", "age", "state", "ranks", "loss", "held-out", "reason")


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
    judged = [judge(entry) if verify_bytes else as_listed(entry) for entry in entries]
    best = best_of([entry.checkpoint for entry in entries if entry.checkpoint is not None])
    rows = [_row(each, best) for each in judged if each.state != "gone"]
    _echo_table([_HEADER, *(row for row in rows if row is not None)])
    refuse_bad(run, judged)


@app.command("verify")
def verify(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Only this one; else all.")] = None,
    key: Annotated[
        Path | None, typer.Option(help="Refuse checkpoints that this key file did not sign.")
    ] = None,
    hashes_only: Annotated[
        bool,
        typer.Option(
            "--hashes-only", help="Do not compare tensors with the model: needs no torch."
        ),
    ] = False,
) -> None:
    """Hash every file of every published checkpoint, and compare its tensors with its model.

    Exits 5 where one is damaged, and 4 where one cannot be read. A checkpoint that a running job
    removes meanwhile is skipped. With --hashes-only the tensors are not compared with the model.

    \b
    Examples:
      shardwise checkpoint verify runs/demo
      shardwise checkpoint verify runs/demo --step 60
      shardwise checkpoint verify runs/demo --key signing.key
      shardwise checkpoint verify runs/demo --hashes-only
    Next: shardwise train goes on from the newest one that is good.
    """
    secret = None if key is None else read_key(key)
    judged: dict[Path, JudgedCheckpoint] = {}
    # A running job may have saved newer ones by the time the listed ones are gone.
    for _ in range(_MOST_ROUNDS):
        for entry in _chosen(run, step, optional=bool(judged)):
            if entry.path not in judged:
                judged[entry.path] = judge(entry, secret, hashes_only=hashes_only)
                _echo_judged(judged[entry.path])
        if any(each.state != "gone" for each in judged.values()):
            break
    found = Counter(each.state for each in judged.values())
    gone = found.pop("gone", 0)
    counts = [f"{found.total()} verified", f"{found.pop('damaged', 0)} damaged"]
    counts += [f"{count} {state}" for state, count in found.items() if state != "good"]
    typer.echo(", ".join([*counts, *([f"{gone} pruned meanwhile"] if gone else [])]))
    refuse_bad(run, judged.values())


@app.command("sign")
def sign_run(
    run: Run,
    key: Annotated[Path, typer.Option(help="File with at least 32 bytes that only you know.")],
    step: Annotated[int | None, typer.Option(help="Only this one; else all.")] = None,
) -> None:
    """Sign checkpoints with your key, so that `verify --key` and `export --key` accept them.

    Each is verified first. Make a key with: head -c 32 /dev/urandom > signing.key

    \b
    Examples:
      shardwise checkpoint sign runs/demo --key signing.key
      shardwise checkpoint sign runs/demo --key signing.key --step 60
    Next: shardwise checkpoint verify runs/demo --key signing.key
    """
    secret = read_key(key)
    judged = [judge(entry) for entry in _chosen(run, step)]
    refuse_bad(run, judged)
    for each in judged:
        if each.state == "good":
            if why_not_signed(each.entry.path, secret) is not None:
                sign(each.entry.path, secret)
            typer.echo(f"step {each.entry.step}: signed")


@app.command("prune")
def prune_run(
    run: Run,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest whole ones to keep.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed.")
    ] = False,
) -> None:
    """Remove the oldest whole checkpoints, and what unfinished saves left behind.

    One of those that stay is verified first, so the last good one is never removed. The one with
    the lowest held-out loss stays too. While a job
    uses the run directory, unfinished saves stay: one of them may be its own.

    \b
    Examples:
      shardwise checkpoint prune runs/demo --keep 2 --dry-run
      shardwise checkpoint prune runs/demo --keep 2
    Next: shardwise checkpoint ls runs/demo
    """
    entries = _entries_of(run)
    good = [entry.checkpoint for entry in entries if entry.checkpoint is not None]
    best = best_of(good)
    oldest = [found for found in good[:-keep] if found is not best]
    old = {found.path for found in oldest}
    if old:
        _validate_one_stays(run, good[-keep:])
    partial = {entry.path for entry in entries if entry.state == "partial"}
    sizes = {entry.path: _size_of(entry.path) for entry in entries if entry.path in old | partial}
    if not dry_run:
        remove(run / "checkpoints", oldest)
    if partial:
        try:
            # On a full disk the lock file finds room only after the old checkpoints are gone.
            with hold_run(run, patience_s=0):
                if not dry_run:
                    clear_partials(run / "checkpoints")
        except UserError as refusal:
            typer.echo(f"unfinished saves stay: {refusal.what}")
            sizes = {path: size for path, size in sizes.items() if path not in partial}
    for path, size in sizes.items():
        typer.echo(f"{'would remove' if dry_run else 'removed'} {path.name}  {format_bytes(size)}")
    total = sum(sizes.values())
    typer.echo(f"{format_bytes(total)} ({total} bytes) {'to free' if dry_run else 'freed'}")


def _entries_of(run: Path) -> list[Entry]:
    if not run.is_dir():
        raise UserError(
            f"there is no run directory {run}",
            fix="name the directory that `shardwise train` printed, such as runs/demo",
        )
    if (run / MANIFEST_NAME).exists():
        # One checkpoint, as it changes hands.
        return [entry for entry in list_entries(run.parent) if entry.path.name == run.name]
    return list_entries(run / "checkpoints")


def _chosen(run: Path, step: int | None, *, optional: bool = False) -> list[Entry]:
    """Published checkpoints: all, or that of `step`, which must exist unless it is optional."""
    published = [entry for entry in _entries_of(run) if entry.is_published]
    chosen = [entry for entry in published if step in (None, entry.step)]
    if step is not None and not chosen and not optional:
        steps = ", ".join(str(entry.step) for entry in published)
        raise UserError(
            f"{run} has no checkpoint of step {step}",
            fix=f"write --step {published[-1].step} (there are: {steps})"
            if steps
            else "leave --step out: nothing is saved yet",
        )
    return chosen


def _echo_judged(judged: JudgedCheckpoint) -> None:
    size = format_bytes(_size_of(judged.entry.path))
    typer.echo(f"step {judged.entry.step}: {SHOWN.get(judged.state, f'good, {size}')}")
    for line in (*judged.problems, *filter(None, [judged.note])):
        typer.echo(f"  {printable(line)}")


def _validate_one_stays(run: Path, kept: list[Checkpoint]) -> None:
    if all(check_checkpoint(found.path) for found in reversed(kept)):
        raise UserError(
            f"nothing was removed: none of the {len(kept)} checkpoints that would stay is whole",
            why="an older one may be the last good one",
            fix=f"see which are damaged: shardwise checkpoint verify {quote(str(run))}",
            code=ExitCode.VERIFY_FAILED,
        )


def _row(judged: JudgedCheckpoint, best: Checkpoint | None) -> tuple[str, ...] | None:
    """The row of a checkpoint, or None where it was removed meanwhile."""
    entry, manifest = judged.entry, judged.entry.manifest
    try:
        created = manifest.created if manifest else entry.path.lstat().st_mtime
    except OSError:
        return None
    return (
        str(entry.step),
        format_bytes(_size_of(entry.path)),
        format_duration(time.time() - created),
        judged.state,
        str(manifest.world_size) if manifest else "-",
        f"{manifest.loss:.4f}" if manifest and manifest.loss is not None else "-",
        _held_out(manifest, is_best=best is not None and best.path == entry.path),
        printable("; ".join(judged.problems or filter(None, [judged.note]))),
    )


def _held_out(manifest: Manifest | None, *, is_best: bool) -> str:
    """The held-out loss, where the step of the checkpoint was evaluated before it was saved."""
    found = None if manifest is None else manifest.held_out
    is_of_step = found is not None and manifest is not None and found.step == manifest.step
    loss = found.loss if found is not None and is_of_step else None
    shown = "-" if loss is None else f"{loss:.4f}"
    return f"{shown} best" if is_best else shown


def _size_of(directory: Path) -> int:
    """The bytes of the files that are still there: a running job may remove the checkpoint."""
    return sum(found.st_size for found in stats_below(directory))


def _echo_table(rows: Iterable[tuple[str, ...]]) -> None:
    found = list(rows)
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    for row in found:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
