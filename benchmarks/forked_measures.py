"""Runs of the tunnel, each in a process of its own: one without memory disturbs no other.

They are forked from a process that has imported torch already, which saves seconds each time.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection

from shardwise.config.plain import config_from_dict
from shardwise.errors import UserError
from shardwise.facts.allocator import ALLOCATOR
from shardwise.facts.calibration import rates_for
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import read_model_config
from shardwise.launch.prepare import measure_model, with_adapters
from shardwise.plan.choose import choose_plan
from shardwise.plan.planned import Plan
from shardwise.units import GIB

# Not FlashAttention 4 or quack: their import touches the GPU.
_USED_ON_GPUS = (
    "torch._inductor.compile_fx",
    "torch._dynamo.backends.inductor",
    "torch._functorch.aot_autograd",
    "torch._functorch._activation_checkpointing.graph_info_provider",
)
Sections = dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Measured:
    """Rank 0 of a plan, on this device."""

    step_s: float
    tokens_per_s: float
    allocated_gib: float
    reserved_gib: float | None


def plan_of(cluster: ClusterSpec, sections: Sections) -> Plan:
    """The plan of a configuration on random tokens."""
    config = config_from_dict({**sections, "data": {"source": "synthetic", **sections["data"]}})
    source = read_model_config(config.model)
    spec = with_adapters(measure_model(config, source), config, source)
    return choose_plan(config, spec, cluster, source, rates_for(cluster))


def import_torch() -> None:
    """Before the first fork; nothing of it may touch the GPU, which a fork cannot share."""
    os.environ.setdefault(*ALLOCATOR)
    # Packages ask at import whether there is a GPU: by way of its management library, not by CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import shardwise.tunnel.timed  # noqa: F401 - once, for all processes that are forked off


def import_ahead(model_types: Iterable[str]) -> None:
    """What rows on a GPU import besides, where it is installed: seconds in each process."""
    families = (f"transformers.models.{name}.modeling_{name}" for name in model_types)
    for name in (*_USED_ON_GPUS, *families):
        with suppress(ImportError):
            import_module(name)


def measure(plan: Plan, *, device: str, link_speed: float, steps: int) -> Measured | str:
    """What was found, or why nothing was."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    arguments = (plan, device, link_speed, steps, theirs)
    process = context.Process(target=_measure, args=arguments)
    process.start()
    theirs.close()
    try:
        found: Measured | str = ours.recv()
    except EOFError:
        found = "the process died"
    process.join()
    return found


def _measure(plan: Plan, device: str, link_speed: float, steps: int, answer: Connection) -> None:
    from shardwise.tunnel.tunnel_run import run_tunnel

    try:
        result = run_tunnel(plan, where=device, link_speed=link_speed, num_steps=steps)
    except UserError as error:
        answer.send(error.what)
        return
    assert result.timing is not None
    memory, timing = result.memory, result.timing
    reserved = None if memory.reserved_bytes is None else memory.reserved_bytes / GIB
    allocated = memory.allocated_bytes / GIB
    answer.send(Measured(timing.step_s, timing.tokens_per_s_per_gpu, allocated, reserved))
