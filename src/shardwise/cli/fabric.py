"""`shardwise fabric`: do the links reach the expected bandwidth? Exits 4 where they do not."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.show import show_table
from shardwise.config.load import load_config
from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import ClusterSpec, resolve_cluster
from shardwise.files import read_bytes
from shardwise.launch.rank_environment import adopt_launcher
from shardwise.units import GIB, KIB, MIB, parse_bytes

if TYPE_CHECKING:
    from shardwise.facts.collective_cost import Collective
    from shardwise.verify.fabric.found import Found

# The largest log of NCCL, or output of nccl-tests, that is read.
_MAX_LOG_BYTES = 2**28
_SIZES = {"cuda": (1 * MIB, 32 * MIB, 1 * GIB), "cpu": (64 * KIB, 1 * MIB, 8 * MIB)}

FileAndChanges = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [cluster.KEY=VALUE]...",
        help="The file of a run, for its cluster; then changes, such as "
        "cluster.interconnect=efa-3200.",
        show_default=False,
    ),
]
NcclLogs = Annotated[
    list[Path] | None,
    typer.Option(help="Judge a log of NCCL_DEBUG=INFO instead (repeatable)."),
]
NcclTests = Annotated[
    list[Path] | None,
    typer.Option(help="Judge the output of an nccl-tests binary instead (repeatable)."),
]
Between = Annotated[
    str | None,
    typer.Option(help="`sites`: measure the link to another site instead.", show_default=False),
]
Meet = Annotated[
    str | None,
    typer.Option(help="With --between sites: HOST:PORT of the site that listens."),
]
Listen = Annotated[
    str | None, typer.Option(help="With --between sites: listen at HOST:PORT for the other.")
]
Seconds = Annotated[
    float, typer.Option(help="With --between sites: how long each way is measured.")
]


def fabric(  # noqa: PLR0913 (a verb's parameters are its options)
    words: FileAndChanges = None,
    cluster: Annotated[
        str | None, typer.Option(help="The cluster to measure, such as 4x8xH100 or 2xCPU.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Sizes of whole tensors, such as 1MiB,64MiB,1GiB.")
    ] = None,
    collectives: Annotated[
        str | None, typer.Option(help="Some of all_gather,reduce_scatter,all_reduce,all_to_all.")
    ] = None,
    min_share: Annotated[
        float, typer.Option(help="Share of the expected bandwidth below which the gate fails.")
    ] = 0.8,
    nccl_log: NcclLogs = None,
    nccl_tests: NcclTests = None,
    between: Between = None,
    meet: Meet = None,
    listen: Listen = None,
    seconds: Seconds = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Measure collectives and pairs of ranks, and compare them with the expected bandwidth.

    The command starts its own ranks. Inside torchrun it is one rank, and rank 0 prints. It exits
    with 4 where data arrives wrong, or where a bandwidth is below its share of the expected one.

    \b
    Examples:
      shardwise fabric
      shardwise fabric --cluster 2xCPU --sizes 64KiB,1MiB
      shardwise torchrun --nnodes 4 --nproc-per-node 8 ... \\
        -m shardwise fabric run.yaml
      shardwise fabric --cluster 2x8xH100 --nccl-tests all_reduce_perf.txt \\
        --nccl-log nccl.log
      shardwise fabric --between sites --listen 0.0.0.0:29700
      shardwise fabric --between sites --meet node1:29700
    Next: shardwise plan --calibrate, or shardwise train run.yaml
    """
    if between is not None or meet is not None or listen is not None:
        _measure_sites(between, meet, listen, seconds, as_json)
        return
    adopt_launcher(os.environ)
    place = _cluster_of(words or [], cluster)
    if not 0 < min_share <= 1:
        raise UserError(
            f"--min-share {min_share:g} is not a share",
            fix="write --min-share 0.8, or another number above 0 and up to 1",
        )
    if nccl_log or nccl_tests:
        found = _read_files(nccl_log or [], nccl_tests or [])
    else:
        found = _measure(place, sizes, collectives)
    if os.environ.get("RANK", "0") == "0":
        _show(found, place, min_share, as_json)


def _measure_sites(
    between: str | None, meet: str | None, listen: str | None, seconds: float, as_json: bool
) -> None:
    """One end of a link between sites."""
    if between != "sites" or (meet is None) == (listen is None) or not 0 < seconds <= 60:
        raise UserError(
            "the link between two sites has an end that listens and one that asks",
            why="both need --between sites, and --seconds is above 0 and up to 60",
            fix="run `shardwise fabric --between sites --listen 0.0.0.0:29700` in one site, and "
            "`shardwise fabric --between sites --meet HOST:29700` in the other",
        )
    from shardwise.council.lines import parse_address
    from shardwise.verify.fabric.site_link import measure_link, serve_one

    address = str(meet or listen)
    try:
        host, port = parse_address(address)
        if meet is None:
            family = socket.getaddrinfo(host, port)[0][0]
            with socket.create_server((host, port), family=family) as listener:
                typer.echo(f"listening at {address}", err=True)
                serve_one(listener)
            return
        found = measure_link(host, port, seconds)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the link to {address} cannot be measured: {error}",
            fix="run `shardwise fabric --between sites --listen 0.0.0.0:29700` in the other site",
            code=ExitCode.ENVIRONMENT,
        ) from error
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    both = (found.sent_bytes_per_s, found.received_bytes_per_s)
    there, back = (f"{rate * 8e-6:.1f} Mbit/s" for rate in both)
    typer.echo(f"{there} to {address}, {back} back, of data; {found.delay_s * 1e3:.1f} ms one way")
    typer.echo(f"next: shardwise plan run.yaml mesh.site=2 {found.settings}")


def _cluster_of(words: Sequence[str], name: str | None) -> ClusterSpec:
    """The first word may be a file; all the others are changes."""
    is_file = bool(words) and "=" not in words[0] and not words[0].startswith("-")
    given = [*words[is_file:], *([f"cluster.name={name}"] if name else [])]
    return resolve_cluster(load_config(words[0] if is_file else None, given).cluster)


def _measure(place: ClusterSpec, sizes: str | None, collectives: str | None) -> Found:
    from shardwise.cli import fabric_rank
    from shardwise.launch.measuring import ask_ranks
    from shardwise.launch.prepare import validate_machine
    from shardwise.verify.fabric.found import Found, Request

    _ = place.fabric  # an unknown network is said before anything starts
    request = Request(place, _kinds(collectives), _sizes(sizes, place))
    if "RANK" in os.environ:
        _validate_launch(place)
        return fabric_rank.measure_as_rank(request)
    validate_machine(place, "fabric")
    _validate_several(place)
    typer.echo(f"measuring {place.world_size} ranks on {place.device_name}", err=True)
    after = "its last words are above; NCCL_DEBUG=INFO shows what NCCL does"
    question = request.to_dict()
    return Found.from_dict(ask_ranks(place.world_size, fabric_rank.MODULE, question, after=after))


def _read_files(logs: Sequence[Path], tests: Sequence[Path]) -> Found:
    from shardwise.verify.fabric.found import Found
    from shardwise.verify.fabric.nccl_log import read_log
    from shardwise.verify.fabric.nccl_tests import read_nccl_tests

    transports = None
    if logs:
        transports = read_log("\n".join(_text(path) for path in logs))
        if not transports.channels:
            raise UserError(
                f"{', '.join(map(str, logs))}: no NCCL channel is named",
                why="there should be lines such as `NCCL INFO Channel 00/0 : 0[0] -> 1[1] via ...`",
                fix="run the job with NCCL_DEBUG=INFO and NCCL_DEBUG_FILE=nccl.%h.%p.log",
            )
    tables = [read_nccl_tests(_text(path), path.name) for path in tests]
    hosts = max((table.hosts for table in tables), key=len, default=())
    points = tuple(point for table in tables for point in table.points)
    return Found(hosts=hosts, points=points, transports=transports)


def _show(found: Found, place: ClusterSpec, min_share: float, as_json: bool) -> None:
    from shardwise.verify.fabric import fabric_text
    from shardwise.verify.fabric.judge_fabric import judge

    judgement = judge(found, place, min_share)
    if as_json:
        typer.echo(json.dumps(fabric_text.to_json(judgement, found, place), indent=2))
    else:
        typer.echo(fabric_text.headline(found, place))
        for title, rows in fabric_text.tables(judgement, found, place):
            typer.echo(title)
            show_table(rows)
    if judgement.failed:
        names = ", ".join(gate.name for gate in judgement.failed)
        raise UserError(
            f"the fabric of {place.name} did not pass: {names}",
            # Groups that share a link share their advice.
            why="\n".join(dict.fromkeys(gate.advice for gate in judgement.failed)),
            fix="mend or leave out what is named, or move the bound: --min-share SHARE",
            code=ExitCode.ENVIRONMENT,
        )


def _kinds(text: str | None) -> tuple[Collective, ...]:
    from shardwise.verify.fabric.found import KINDS

    if text is None:
        return KINDS
    names = [word.strip() for word in text.split(",")]
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise UserError(
            f"--collectives {', '.join(unknown)} is not known",
            fix=f"write some of --collectives {','.join(KINDS)}",
        )
    return tuple(kind for kind in KINDS if kind in names)


def _sizes(text: str | None, place: ClusterSpec) -> tuple[int, ...]:
    if text is None:
        return _SIZES[place.device]
    try:
        sizes = tuple(sorted(parse_bytes(word) for word in text.split(",")))
    except ValueError as error:
        raise UserError(
            f"--sizes: {error}", fix="write sizes such as --sizes 64KiB,1MiB,1GiB"
        ) from None
    least = 4 * place.world_size
    if sizes[0] < least:
        raise UserError(
            f"--sizes: {sizes[0]} bytes are too few for {place.world_size} ranks",
            fix=f"write --sizes {least} or more",
        )
    return sizes


def _validate_launch(place: ClusterSpec) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if world != place.world_size:
        raise UserError(
            f"the launcher has started {world} ranks; {place.name} has {place.world_size}",
            fix=f"leave --cluster out, or start {place.world_size} ranks with torchrun",
            code=ExitCode.ENVIRONMENT,
        )
    _validate_several(place)


def _validate_several(place: ClusterSpec) -> None:
    if place.world_size == 1:
        raise UserError(
            "one rank has no other rank to communicate with",
            why=f"{place.name} is one device: {place.device_name}",
            fix="try it on this CPU with --cluster 2xCPU; torchrun starts it on several nodes",
            code=ExitCode.ENVIRONMENT,
        )


def _text(path: Path) -> str:
    try:
        return read_bytes(path, _MAX_LOG_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}",
            fix=f"name a file that is there; see: ls -l {quote(str(path.parent))}",
        ) from None
