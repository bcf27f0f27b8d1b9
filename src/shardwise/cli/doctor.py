"""`shardwise doctor`: known faults of a configuration, a machine or a run, with what to do."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.find_run import run_or_name
from shardwise.cli.show import show_table
from shardwise.errors import ExitCode, UserError, printable

if TYPE_CHECKING:
    from shardwise.doctor.check import Finding
    from shardwise.doctor.examine import Diagnosis

_WIDTH = 100


def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|RUN|NODE.json...] [KEY=VALUE]...",
            help="A configuration and changes to it, a run or its name, or what the doctors of "
            "several nodes wrote. Without: this machine.",
            show_default=False,
        ),
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option("--log", help="Look for known lines in this log too (repeatable)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="ID", help="Say what a check is about.")
    ] = None,
    shows_all: Annotated[bool, typer.Option("--list", help="List all checks.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Warnings too end the command with an error.")
    ] = False,
) -> None:
    """Look for known faults, and say what each means and what to do.

    Without a name it looks at this machine: limits, disk, links and GPUs. A configuration is
    planned, and the plan is looked at too. A file of another tool, or a script, is read and never
    run. Of a run it looks at the record and the logs, and says
    why it is slower than its plan. Exits with 2 where a configuration has an error, 4 where a
    machine has one, and 5 where a run has one.

    \b
    Examples:
      shardwise doctor
      shardwise doctor run.yaml cluster=4x8xH100
      shardwise doctor fsdp.yaml
      shardwise doctor runs/demo
      shardwise doctor --log slurm-4711.out
      shardwise doctor --json > NODE.json; shardwise doctor NODE.json OTHER.json
      shardwise doctor --explain SW104
      shardwise doctor --list
    Next: shardwise train run.yaml
    """
    if shows_all:
        _list_checks(as_json)
    elif explain is not None:
        _explain(explain)
    else:
        subject, found = _examine(words or [], logs or [])
        _show(subject, found, as_json)
        _end(subject, found, strict=strict)


def _examine(words: Sequence[str], logs: Sequence[Path]) -> tuple[str, Diagnosis]:
    """What was named, in words, and what was found in it."""
    from shardwise.doctor import examine

    if not words:
        if logs:
            return ", ".join(map(str, logs)), examine.examine_logs(logs)
        return "this machine", examine.examine_machine(os.environ)
    first, *rest = words
    run = run_or_name(first)
    if run.is_dir():
        return str(run), examine.examine_run(run, examine.read_logs(logs))
    if rest and all(word.endswith(".json") for word in words):
        return "these nodes", examine.examine_nodes(list(map(Path, words)))
    found = examine.examine_config(Path(first), rest, os.environ)
    return first, examine.joined(found, examine.examine_logs(logs)) if logs else found


def _show(subject: str, found: Diagnosis, as_json: bool) -> None:
    if as_json:
        data = {
            "subject": subject,
            "checks": found.num_checks,
            "findings": [finding.to_dict() for finding in found.findings],
            "notes": list(found.notes),
            "node": None if found.node is None else found.node.to_dict(),
            **found.details,
        }
        typer.echo(json.dumps(data, indent=2))
        return
    for finding in found.findings:
        _show_finding(finding)
    for note in found.notes:
        typer.echo(printable(note))
    typer.echo(_summary(subject, found))


def _show_finding(finding: Finding) -> None:
    check = finding.check
    typer.echo(f"{check.level} {check.id}: {check.title}")
    lines = [line for text in finding.evidence.splitlines() for line in _wrapped("seen", text)]
    for line in [*lines, *_wrapped("why", check.why), *_wrapped("fix", check.fix)]:
        typer.echo(line)


def _wrapped(name: str, text: str) -> list[str]:
    first, rest = f"  {name}: ", " " * (len(name) + 4)
    plain = printable(text)
    return textwrap.wrap(
        plain, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _summary(subject: str, found: Diagnosis) -> str:
    counts = [
        f"{number} {level}{'s' * (number > 1)}"
        for level in ("error", "warning", "note")
        if (number := found.count(level))
    ]
    what = ", ".join(counts) if counts else "nothing found"
    return f"{subject}: {what} by {found.num_checks} checks"


def _end(subject: str, found: Diagnosis, *, strict: bool) -> None:
    code = found.exit_code(strict=strict)
    if code != ExitCode.OK:
        ids = list(dict.fromkeys(f.check.id for f in found.findings if f.check.level != "note"))
        raise UserError(
            f"{subject} has faults: {', '.join(ids)}",
            fix=f"each has a fix above; more about one: shardwise doctor --explain {ids[0]}",
            code=code,
        )


def _explain(given: str) -> None:
    from shardwise.doctor.registry import check_named, exit_code_of

    check = check_named(given)
    typer.echo(f"{check.id} ({check.level}): {check.title}")
    for line in (*_wrapped("why", check.why), *_wrapped("fix", check.fix)):
        typer.echo(line)
    if check.level == "error":
        typer.echo(f"  exit code: {int(exit_code_of(check))}")


def _list_checks(as_json: bool) -> None:
    from shardwise.doctor.registry import GROUPS

    if as_json:
        rows = [
            {"id": c.id, "group": group, "level": c.level, "title": c.title, "why": c.why,
             "fix": c.fix}
            for group, checks in GROUPS.items() for c in checks
        ]  # fmt: skip
        typer.echo(json.dumps(rows, indent=2))
        return
    for group, checks in GROUPS.items():
        typer.echo(group)
        show_table([(check.id, check.level, check.title) for check in checks])
