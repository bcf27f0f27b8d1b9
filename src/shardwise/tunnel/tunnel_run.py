"""One run through the tunnel: which device, and what can go wrong there."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Literal, get_args

import torch

from shardwise.errors import ExitCode, UserError
from shardwise.facts.probe import probe_cpu
from shardwise.plan.planned import Plan
from shardwise.tunnel.emulated_links import Links
from shardwise.tunnel.fake import Tell, run_fake, tell_nobody
from shardwise.tunnel.result import TunnelResult
from shardwise.tunnel.timed import run_timed
from shardwise.units import format_bytes

Where = Literal["auto", "cuda", "cpu", "fake"]


def run_tunnel(
    plan: Plan,
    *,
    where: str,
    link_speed: float,
    num_steps: int,
    trace: Path | None = None,
    tell: Tell = tell_nobody,
) -> TunnelResult:
    """Rank 0 of the plan's run on `where`; `auto` is a GPU if there is one, else fake tensors.

    It tells of each stage when that begins.
    """
    _validate(where, link_speed, num_steps)
    if trace is not None:
        _validate_trace(trace, where)
    if plan.decided.pipeline > 1:
        raise _refuse_stages(plan.decided.pipeline)
    links = Links.of(plan.cluster.fabric, link_speed)
    match where:
        case "cpu":
            _validate_memory(plan)
            return run_timed(plan, links, "cpu", num_steps, trace)
        case "auto" | "cuda" if torch.cuda.is_available():
            return _run_on_gpu(plan, links, num_steps, trace)
        case "cuda":
            raise UserError(
                "--device cuda, but torch sees no GPU here",
                why="either there is none, or this torch was built without CUDA",
                fix="leave --device out: then the same step runs on fake tensors",
                code=ExitCode.ENVIRONMENT,
            )
    return run_fake(plan, links, tell)


def _run_on_gpu(plan: Plan, links: Links, num_steps: int, trace: Path | None) -> TunnelResult:
    try:
        return run_timed(plan, links, "cuda", num_steps, trace)
    except torch.cuda.OutOfMemoryError as error:
        name = torch.cuda.get_device_name()
        held = format_bytes(torch.cuda.max_memory_allocated())
        raise UserError(
            f"rank 0 of {plan.world_size} does not fit on this {name}",
            why=f"it ran out of memory after {held}; the plan expects "
            f"{format_bytes(plan.memory.total)}: {str(error).splitlines()[0]}",
            fix="write memory.checkpoint_activations=full, or train.micro_batch=1, or see where "
            "the bytes are with --device fake",
            code=ExitCode.DOES_NOT_FIT,
        ) from error


def _refuse_stages(ranks: int) -> UserError:
    return UserError(
        f"the tunnel cannot run mesh.pipeline={ranks}",
        why="rank 0 would wait for hidden states and gradients of stages that are not there",
        fix="write mesh.pipeline=1; what stages take and wait for is in `shardwise plan`",
    )


def _validate(where: str, link_speed: float, num_steps: int) -> None:
    if where not in get_args(Where):
        raise UserError(
            f"--device {where} is no device of the tunnel",
            fix=f"write --device {', or --device '.join(get_args(Where))}",
        )
    if not link_speed > 0:
        raise UserError(
            f"--link-speed {link_speed:g} is no speed",
            why="it is a factor on the rates of all links: 0.5 is half as fast, inf takes no time",
            fix="write --link-speed 1, or another number above 0",
        )
    if num_steps < 1:
        raise UserError(f"--steps {num_steps}: nothing to measure", fix="write --steps 1 or more")


def _validate_trace(trace: Path, where: str) -> None:
    """Raise before minutes are spent on steps."""
    if where == "fake" or (where == "auto" and not torch.cuda.is_available()):
        raise UserError(
            "--trace needs a device",
            why="fake tensors compute nothing, so nothing takes time",
            fix="write --device cpu for a tiny model, or run it on a machine with a GPU",
        )
    if not trace.name.endswith(".json.gz"):
        named = trace.with_name(f"{trace.name.split('.')[0]}.json.gz")
        raise UserError(
            f"--trace {trace} is not a name for a trace",
            why="a trace is compressed JSON, so its name ends in .json.gz",
            fix=f"write --trace {quote(str(named))}",
        )
    if not trace.parent.is_dir():
        raise UserError(
            f"--trace {trace}: there is no directory {trace.parent}",
            fix=f"mkdir -p {quote(str(trace.parent))}, or write --trace {quote(trace.name)}",
        )


def _validate_memory(plan: Plan) -> None:
    """Raise where a step of a large model on a CPU would only swap."""
    memory = probe_cpu().memory_bytes
    if plan.memory.states > memory:
        raise UserError(
            f"rank 0 of {plan.world_size} does not fit into this machine's memory",
            why=f"its shards take {format_bytes(plan.memory.states)}, the machine has "
            f"{format_bytes(memory)}",
            fix="write --device fake, which holds no data",
            code=ExitCode.DOES_NOT_FIT,
        )
