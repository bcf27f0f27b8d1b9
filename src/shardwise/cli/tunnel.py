"""`shardwise tunnel`: rank 0 of a run on this machine, before anything is rented."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.told_stages import ToldStages
from shardwise.config.load import load_config

if TYPE_CHECKING:
    from shardwise.tunnel.result import TunnelResult

TraceFile = Annotated[
    Path | None,
    typer.Option(
        help="Write a trace of two more steps there (NAME.json.gz), for shardwise profile.",
        show_default=False,
    ),
]


def tunnel(  # noqa: PLR0913 (a verb's parameters are its options)
    config: Annotated[str, typer.Argument(help="YAML, TOML or JSON file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes, such as optim.lr=3e-4.", show_default=False)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="The cluster to be rank 0 of, such as 4x8xH100.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to measure in each pass.")] = 8,
    link_speed: Annotated[
        float,
        typer.Option(help="Multiply the speed of all links by this; inf: links take no time."),
    ] = 1.0,
    device: Annotated[
        str,
        typer.Option(help="auto (a GPU, else fake tensors), cuda, cpu (tiny models) or fake."),
    ] = "auto",
    trace: TraceFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Run the real training code as rank 0 of a cluster that is not there.

    On a GPU the collectives become local copies plus the modelled time of the cluster's links, on
    the streams that FSDP2 uses: step time, memory and exposed communication are measured. Without
    a GPU one step runs on fake tensors: exact tensor bytes and every collective, in seconds.

    \b
    Examples:
      shardwise tunnel run.yaml --cluster 4x8xH100
      shardwise tunnel run.yaml --cluster 4x8xH100 --link-speed 0.5
      shardwise tunnel run.yaml --cluster 4x8xH100 --trace rank0.json.gz
      shardwise tunnel run.yaml --device fake train.micro_batch=4 --json
    Next: shardwise plan run.yaml, or shardwise train run.yaml
    """
    from shardwise.facts.allocator import ALLOCATOR
    from shardwise.launch.prepare import choose_plan

    given = [*(overrides or []), *([f"cluster.name={cluster}"] if cluster else [])]
    plan = choose_plan(load_config(config, given))
    # The launcher sets the same for ranks, so reserved memory is what a rank reserves.
    os.environ.setdefault(*ALLOCATOR)
    # torch takes seconds to import, so faults of the file are reported before.
    stages = ToldStages()
    stages.tell("starting torch")
    from shardwise.tunnel.tunnel_run import run_tunnel

    try:
        result = run_tunnel(
            plan, where=device, link_speed=link_speed, num_steps=steps, trace=trace,
            tell=stages.tell,
        )  # fmt: skip
    finally:
        stages.end()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        show_result(result, join([config, *(overrides or [])]))


def show_result(result: TunnelResult, words: str) -> None:
    """Memory beside the plan's, collectives, times, and what to try next."""
    from shardwise.cli.show import show_table, wrapped
    from shardwise.plan.explain import headline
    from shardwise.tunnel import result_text

    typer.echo(wrapped(headline(result.plan)))
    typer.echo(result_text.headline(result))
    typer.echo("memory of rank 0")
    show_table(result_text.memory_rows(result))
    typer.echo(result_text.traffic_title(result))
    show_table(result_text.traffic_rows(result))
    show_table(result_text.axis_rows(result))
    if result.timing is not None:
        typer.echo(f"time of a step, median of {result.timing.num_steps}")
        show_table(result_text.timing_rows(result))
    for note in result.notes:
        typer.echo(wrapped(f"note: {note}"))
    for line in result_text.next_lines(result, words):
        typer.echo(line)
