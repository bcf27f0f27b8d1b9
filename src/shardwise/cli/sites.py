"""`shardwise sites`: where sites that are jobs of their own meet."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.errors import ExitCode, UserError


def sites(
    listen: Annotated[str, typer.Argument(help="HOST:PORT that all sites reach.")],
    count: Annotated[int, typer.Option("--sites", help="Sites of the run (mesh.site).")] = 2,
    record: Annotated[
        Path, typer.Option(help="The record of what is decided. A later start goes on from it.")
    ] = Path("sites.jsonl"),
    replay: Annotated[
        Path | None,
        typer.Option(help="Decide as this record says, and compare the bits.", show_default=False),
    ] = None,
    patience_s: Annotated[
        float, typer.Option("--patience", help="Seconds that a late or silent site is waited for.")
    ] = 300.0,
) -> None:
    """Decide which sites take part in every outer step of DiLoCo.

    Each site is a job of its own with diloco.meet=HOST:PORT and its number in diloco.site. One that
    dies or is cut off is left behind; when it returns it takes over the state of the others. This
    process needs no GPU and little memory, and may be started again at any time. It ends when all
    sites have finished.

    \b
    Examples:
      shardwise sites node1:29700 --sites 2
      shardwise sites node1:29700 --replay sites.jsonl --record again.jsonl
    Next: shardwise train run.yaml diloco.meet=node1:29700 diloco.site=0
    """
    from shardwise.council.council import Council
    from shardwise.council.history import CouncilRecord, Past, read_record
    from shardwise.council.serve import Served

    _validate(count, patience_s)
    script = None if replay is None else read_record(replay)
    past = read_record(record) if record.exists() else Past()
    if replay is not None and record.exists():
        raise UserError(
            f"{record} exists already",
            why="a replay begins from the start",
            fix="name a new file: --record FILE",
        )
    listener = _listen(listen)
    council = Council(count, patience_s, past=past, script=script, now=time.monotonic())
    found = CouncilRecord(record)
    try:
        served = Served(council, listener, found, _tell)
        typer.echo(f"waiting for {count} sites at {listen}")
        while len(council.done) < count or not served.is_quiet:
            served.step()
    finally:
        found.close()
        listener.close()
    if script is not None:
        _compare(script, read_record(record))


def _validate(count: int, patience_s: float) -> None:
    if count < 2:
        raise UserError(
            f"--sites is {count}, but there is nothing to decide for fewer than two",
            fix="write --sites 2, or as many as mesh.site says",
        )
    if not 0 < patience_s < float("inf"):
        raise UserError(
            f"--patience is {patience_s:g}, but it must be a positive number of seconds",
            fix="write --patience 300",
        )


def _listen(address: str) -> socket.socket:
    from shardwise.council.lines import parse_address

    try:
        host, port = parse_address(address)
        family = socket.getaddrinfo(host, port)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{address} cannot be listened at: {error}",
            fix="name an address of this machine and a free port, such as 0.0.0.0:29700",
            code=ExitCode.ENVIRONMENT,
        ) from error


def _tell(event: Mapping[str, Any]) -> None:
    match event["event"]:
        case "start":
            typer.echo(f"sites {_named(event['members'])} begin at step {event['step']}")
        case "round":
            joined = f"; site {_named(event['joined'])} joins" if event["joined"] else ""
            members = _named(event["members"])
            typer.echo(f"outer step after step {event['step']} of sites {members}{joined}")
        case "lost":
            typer.echo(f"ALERT: site {event['site']} is gone, and the others go on")
        case "diverged":
            typer.echo(f"ALERT: site {event['site']} has other bits, and begins again with theirs")
        case "left":
            typer.echo(f"site {event['site']} has ended after step {event['step']}")


def _named(members: list[int]) -> str:
    return " ".join(map(str, members))


def _compare(before: Any, after: Any) -> None:
    """Say whether the replay had the same bits."""
    if not before.is_exact:
        typer.echo("note: a site went on from its own memory, so bits may differ")
    pairs = [(step, each.digest, after.rounds.get(step)) for step, each in before.rounds.items()]
    wrong = [step for step, digest, found in pairs if found is None or found.digest != digest]
    if before.digest != after.digest:
        wrong.append(before.finished)
    if wrong:
        raise UserError(
            f"the replay has other bits from step {min(wrong)} on",
            fix="give both runs train.deterministic=true and the same software",
            code=ExitCode.VERIFY_FAILED,
        )
    typer.echo(f"{len(pairs)} outer steps replayed with the same bits")
