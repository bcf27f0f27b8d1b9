"""`shardwise plan`: what would happen, and why; starts nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from shardwise.cli.calibrate import calibrate_for
from shardwise.cli.named_run import (
    ConfigFile,
    GlobalBatch,
    GpuGbps,
    GpuGib,
    GpuTflops,
    MicroBatch,
    ModelName,
    Overrides,
    SeqLen,
    changes_of,
    changes_of_gpu,
    read_amount,
    split_words,
)
from shardwise.cli.show import run_of, show_difference, show_plan
from shardwise.config.load import load_config
from shardwise.config.schema import ClusterConfig
from shardwise.config.trees import start_from_example
from shardwise.errors import UserError
from shardwise.facts.cluster import LOCAL, ClusterSpec, resolve_cluster
from shardwise.plan.axis_traffic import planned_traffic
from shardwise.plan.goal import Goal
from shardwise.plan.picture import picture_data
from shardwise.units import format_bytes

if TYPE_CHECKING:
    from shardwise.plan.planned import Plan


Elsewhere = Annotated[
    str | None, typer.Option(help="Plan for this cluster instead, such as 4x8xH100.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Show the difference that this change makes (k=v; repeatable)."),
]
Budget = Annotated[
    float | None,
    typer.Option(
        help="Show the hours and the cost of this many tokens, such as 15B.",
        parser=read_amount,
        metavar="COUNT",
    ),
]
Aim = Annotated[
    str,
    typer.Option("--for", help="fastest (all devices), cheapest (per token) or fewest (devices)."),
]
PageFile = Annotated[
    Path | None,
    typer.Option(help="Write the plan as one HTML page, for a browser and to pass on."),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="First measure this machine, for this and later plans; needs no config.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Calibrate in seconds, less exactly.")]


def plan(  # noqa: PLR0913 (a verb's parameters are its options)
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: ModelName = None,
    cluster: Elsewhere = None,
    gpu_tflops: GpuTflops = None,
    gpu_gib: GpuGib = None,
    gpu_gbps: GpuGbps = None,
    seq: SeqLen = None,
    micro_batch: MicroBatch = None,
    global_batch: GlobalBatch = None,
    changes: Changes = None,
    top: Annotated[int, typer.Option(help="How many other plans to show.")] = 5,
    tokens: Budget = None,
    goal: Aim = "fastest",
    as_json: Annotated[bool, typer.Option("--json", help="Print plan.json.")] = False,
    html: PageFile = None,
    calibrate: Measure = False,
    quick: Quick = False,
) -> None:
    """Print the plan of a run with a reason for every choice, its memory, speed and cost.

    No GPU needed, except to calibrate for one. `shardwise config ls` lists the models that come
    along.

    \b
    Examples:
      shardwise plan run.yaml
      shardwise plan --model Qwen/Qwen3-8B --cluster 8xH100 --seq 8192
      shardwise plan run.yaml --cluster 4x8xH100 --tokens 15B optim.lr=1e-4
      shardwise plan run.yaml model=qwen3-30b-a3b
      shardwise plan run.yaml --set memory.checkpoint_activations=full
      shardwise plan run.yaml --cluster 8x8xH100 --for cheapest
      shardwise plan run.yaml --cluster 8xX1 --gpu-tflops 400 --gpu-gib 96
        --gpu-gbps 1600
      shardwise plan run.yaml --html plan.html
      shardwise plan --calibrate
      shardwise plan --calibrate run.yaml --cluster 2xCPU
    Next: shardwise train run.yaml
    """
    config, words = split_words(config, overrides, model)
    has_file = config is not None
    named = changes_of(
        model=model, seq=seq, micro_batch=micro_batch, global_batch=global_batch, has_file=has_file
    )
    place = [f"cluster.name={cluster}"] if cluster else []
    given = [*named, *words, *place, *changes_of_gpu(gpu_tflops, gpu_gib, gpu_gbps)]
    _validate_together(changes, html, as_json=as_json, calibrate=calibrate, quick=quick)
    if calibrate:
        calibrate_for(_cluster_of(config, given, cluster), quick=quick)
    if config is None and model is None:
        _end_without_config(calibrated=calibrate)
        return
    chosen = _plan_of(config, given, goal)
    if changes:
        show_difference(chosen, _plan_of(config, [*given, *changes], goal), tokens)
    else:
        _tell(chosen, top, tokens, html, as_json=as_json)


def _validate_together(
    changes: list[str] | None, html: Path | None, *, as_json: bool, calibrate: bool, quick: bool
) -> None:
    """Raise where an option would do nothing."""
    if quick and not calibrate:
        raise UserError("--quick does nothing by itself", fix="write --calibrate --quick")
    asked = {"--html": html is not None, "--json": as_json, "--set": bool(changes)}
    apart = [option for option, is_asked in asked.items() if is_asked][:2]
    if len(apart) == 2:
        fix = " or ".join(f"leave {option} out" for option in apart)
        raise UserError(f"{' and '.join(apart)} answer apart", fix=fix)


def _end_without_config(*, calibrated: bool) -> None:
    """End where no configuration is named, which is an error unless this run calibrated."""
    if not calibrated:
        raise UserError(
            "no configuration is named",
            fix="name a file: `shardwise plan FILE`, or a model: `shardwise plan --model "
            f"llama-3.1-8b --cluster 8xH100`; or {start_from_example()}",
        )
    typer.echo("next: shardwise plan FILE   (with the rates of this machine)", err=True)


def _plan_of(config: str | None, given: list[str], goal: str) -> Plan:
    from shardwise.launch.prepare import choose_plan

    aim = _goal(goal)
    return choose_plan(load_config(config, given), goal=aim)


def _tell(
    chosen: Plan, top: int, tokens: float | None, html: Path | None, *, as_json: bool
) -> None:
    """Print the plan as JSON, or write it as a page, or explain it."""
    if as_json:
        _print_json(chosen, tokens)
    elif html is not None:
        _write_page(chosen, html, tokens)
    else:
        _explain(chosen, top, tokens)


def _print_json(chosen: Plan, tokens: float | None) -> None:
    traffic = {axis: asdict(sums) for axis, sums in planned_traffic(chosen).items()}
    run = asdict(run_of(chosen))
    more = {"mesh": picture_data(chosen), "run": run, "traffic": traffic}
    if tokens is not None:
        more["budget"] = _budget_of(chosen, tokens)
    typer.echo(json.dumps({**chosen.to_dict(), **more}, indent=2))


def _budget_of(chosen: Plan, tokens: float) -> dict[str, float | None]:
    """What a number of tokens takes; None where no rates or no price are known."""
    forecast, billions = chosen.forecast, tokens / 1e9
    hours = None if forecast is None else forecast.hours_per_billion_tokens * billions
    usd = None if forecast is None else forecast.usd_per_billion_tokens
    return {"tokens": tokens, "hours": hours, "usd": None if usd is None else usd * billions}


def _explain(chosen: Plan, top: int, tokens: float | None) -> None:
    from shardwise.plan.inputs import check_bytes

    show_plan(chosen, top, tokens)
    for problem in check_bytes(chosen):
        typer.echo(f"warning: `shardwise train` refuses this: {problem.what}; {problem.fix}")


def _write_page(chosen: Plan, target: Path, tokens: float | None) -> None:
    from shardwise.report.plan_page import write_plan_page

    size = write_plan_page(chosen, target, tokens)
    typer.echo(f"wrote {target} ({format_bytes(size)})\nnext: open it in a browser")


def _goal(word: str) -> Goal:
    if word not in get_args(Goal):
        raise UserError(
            f"--for {word} is not known", fix=f"write --for {', or --for '.join(get_args(Goal))}"
        )
    return cast("Goal", word)


def _cluster_of(config: str | None, given: list[str], name: str | None) -> ClusterSpec:
    """The configuration's, else the named one, else this machine."""
    if config is not None:
        return resolve_cluster(load_config(config, given).cluster)
    return resolve_cluster(ClusterConfig(name=name or LOCAL))
