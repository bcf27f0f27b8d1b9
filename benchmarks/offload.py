"""Parameters and Adam in host memory: ours, FSDP2's CPUOffloadPolicy as it comes, and none of it.

    python benchmarks/offload.py [--model llama-3.2-3b] [--micro-batch 4] [--accumulation 8]
        [--runs ours plain none ...] [--steps 2] [--seconds 300] [--json FILE]
    python benchmarks/offload.py --layers 2 --accumulation 1 --steps 1 --at-once 3

`ours` is `memory.offload=cpu` with updates beside the next forward, `none` the same run without
offload. `plain` is what a script has: transformers' model in fp32 on the host, `fully_shard` of
each compiled block with CPUOffloadPolicy and bf16 compute, torch's fused AdamW on the host, and
every micro-batch's gradients reduced. Random tokens and weights, one GPU. Each run is a process of
its own; FILE is written after each. `plain` makes half of the steps, because they take long.

The log of a run has the seconds of each phase: build, page-locked shards, fill, optimizer state,
first step, steps, and of each step what the host did when. Every 20 seconds it has the stacks of
all threads. So a run that does not end says where it waits.

An update beside the next forward shows from the second measured step on. The second command
measures nothing: it leaves the compiler's results on disk.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from family_forks import Call, run_calls
from forked_measures import import_torch, plan_of
from gpu import driver, versions
from shardwise.facts.allocator import ALLOCATOR
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.presets import PRESETS
from shardwise.plan.planned import Plan
from shardwise.units import GIB

RUNS = ("ours", "plain", "none")
_SEQ_LEN = {False: 4096, True: 64}
_STACKS_EVERY_S = 20
# Of the log of a run that did not end.
_LAST_LINES = 60


@dataclass(slots=True)
class Phases:
    """Seconds of each phase of a run, said as they end."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)
    _doing: str = ""
    _parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase. Inside another one it is a part of it."""
        start = time.perf_counter()
        print(f"{name} ...", flush=True)
        yield
        self.seconds[name] = time.perf_counter() - start
        print(f"{name}: {self.seconds[name]:.2f} s, {_host_memory()}", flush=True)

    def begin(self, part: str) -> None:
        """What the host does now in a step."""
        now = time.perf_counter()
        self._parts[self._doing] += now - self._since
        self._doing, self._since = part, now

    def end_step(self, number: int) -> None:
        """Say what the host did in a step."""
        self.begin("")
        self._parts.pop("", None)
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._parts.items())
        print(f"step {number}: the host's seconds: {parts}", flush=True)
        self._parts.clear()

    def watch(self, module: Any, name: str, says: str) -> None:
        """Let a function of a module be a phase."""
        function = getattr(module, name)

        def watched(*args: Any, **named: Any) -> Any:
            with self.phase(says):
                return function(*args, **named)

        setattr(module, name, watched)


def _host_memory() -> str:
    """What this process has in host memory, and how much of it torch has page-locked."""
    import torch

    text = f"{_host_gib():.1f} GiB of host memory"
    if torch.cuda.is_initialized() and hasattr(torch.cuda, "host_memory_stats"):
        stats = torch.cuda.host_memory_stats()
        locked = stats.get("allocated_bytes.current", 0) / GIB
        took = stats.get("host_alloc_time.total", 0) / 1e6
        text += f", {locked:.1f} GiB page-locked in {took:.1f} s"
    return text


def plan(given: argparse.Namespace, *, offload: bool) -> Plan:
    on_cpu = given.device == "cpu"
    memory = {"offload": "cpu"} if offload else {}
    overrides = {"num_hidden_layers": given.layers} if given.layers else {}
    sections: dict[str, dict[str, object]] = {
        "model": {"name": given.model, "overrides": overrides},
        "data": {"seq_len": _SEQ_LEN[on_cpu]},
        "memory": {**memory, **({"compile": False} if on_cpu else {})},
        "precision": {"param": "fp32"} if on_cpu else {},
        "train": {"micro_batch": given.micro_batch, "accumulation": given.accumulation},
    }
    return plan_of(parse_cluster(f"1x{'CPU' if on_cpu else given.gpu}"), sections)


def measure_ours(given: argparse.Namespace, *, offload: bool) -> dict[str, Any]:
    """The steps of training, with the optimizer that training has."""
    import torch

    import shardwise.training.session as session_room
    from shardwise.training.overlapped import build_for
    from shardwise.training.step import Stepper
    from shardwise.training.surroundings import fast_attention, prepare_matmuls
    from shardwise.tunnel.emulate import Emulator
    from shardwise.tunnel.emulated_links import Links
    from shardwise.tunnel.link_clock import CudaClock, HostClock
    from shardwise.tunnel.rank_zero import fill_rank, plan_on, shard_rank
    from shardwise.tunnel.world import rank_zero_of

    phases = Phases()
    with phases.phase("plan"):
        found = plan(given, offload=offload)
    for name, says in (
        ("allocate_shards", "shards, page-locked with offload"),
        ("initialise_weights", "first values"),
    ):
        phases.watch(session_room, name, says)
    on_gpu = given.device == "cuda"
    here = plan_on(found, given.device, compiled=on_gpu)
    prepare_matmuls(here)
    emulator = Emulator(
        Links.of(found.cluster.fabric, inf), CudaClock() if on_gpu else HostClock(), free=True
    )
    with rank_zero_of(1):
        with phases.phase("build"):
            shell = shard_rank(here, emulator)
        with phases.phase("fill"):
            rank = fill_rank(shell, print, has_values=True)
        session = rank.session
        with phases.phase("optimizer state"):
            optimizer: Any = build_for(session.model, session.units, here)
            for param in session.model.parameters():
                optimizer.state_of(param)
        stepper = Stepper(session.model, optimizer, here, session.mesh, on_phase=phases.begin)

        def step(number: int) -> None:
            phases.begin("data")
            batches = rank.loader.step_batches(number)
            stepper.run([batch.pinned() for batch in batches] if on_gpu else batches, 0.0)
            phases.end_step(number)

        with fast_attention(torch.device(given.device)):
            found_here = timed(step, given, given.steps, stepper.settle, phases)
            return found_here | {"plan_tok_s": _tokens_per_s(found)}


def measure_plain(given: argparse.Namespace) -> dict[str, Any]:
    """A script with FSDP2 as its tutorials have it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    phases = Phases()
    on_gpu, fields = given.device == "cuda", {**PRESETS[given.model], "use_cache": False}
    if given.layers:
        fields["num_hidden_layers"] = given.layers
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    how: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=on_gpu)}
    if on_gpu:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    how["mesh"] = dist.init_device_mesh(given.device, (1,))
    for block in model.model.layers:
        if on_gpu:
            block.compile()
        fully_shard(block, **how)
    fully_shard(model, **how)
    with phases.phase("shards, page-locked"):
        model.to_empty(device="cpu")
    rotary = model.model.rotary_emb
    rotary.inv_freq = type(rotary)(config).inv_freq.to(given.device)
    # A CPU makes random numbers by one thread.
    noise = 0.02 * torch.randn(2**20)
    with phases.phase("first values"), torch.no_grad():
        for param in model.parameters():
            own = param.to_local()
            _repeat(noise, own) if own.dim() > 1 else own.fill_(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    shape = (given.micro_batch, _SEQ_LEN[not on_gpu])

    def step(number: int) -> None:
        for _ in range(given.accumulation):
            phases.begin("forward")
            tokens = torch.randint(config.vocab_size, shape, device=given.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            phases.begin("backward")
            (loss / given.accumulation).backward()
        phases.begin("update")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        phases.end_step(number)

    return timed(step, given, max(1, given.steps // 2), lambda: None, phases)


def _repeat(noise: Any, own: Any) -> None:
    for part in own.view(-1).split(len(noise)):
        part.copy_(noise[: len(part)])


def timed(
    step: Callable[[int], None],
    given: argparse.Namespace,
    num_steps: int,
    settle: Callable[[], None],
    phases: Phases,
) -> dict[str, Any]:
    """Seconds of each step after the first, whatever is left to do at the end among them."""
    import torch

    from shardwise.metrics.meters import peak_memory

    wait = torch.cuda.synchronize if given.device == "cuda" else nullcontext
    with phases.phase("first step"):
        step(0)
        settle()
        wait()
    with phases.phase("steps"):
        for number in range(1, 1 + num_steps):
            step(number)
        settle()
        wait()
    step_s = phases.seconds["steps"] / num_steps
    tokens = given.micro_batch * given.accumulation * _SEQ_LEN[given.device == "cpu"]
    peak = peak_memory(torch.device(given.device))
    return {
        "phases_s": {name: round(seconds, 2) for name, seconds in phases.seconds.items()},
        "step_s": step_s,
        "tok_s": tokens / step_s,
        "reserved_gib": peak.reserved / GIB,
        "host_gib": _host_gib(),
    }


def _host_gib() -> float:
    """The most that this process had in host memory."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / GIB


def _tokens_per_s(found: Plan) -> float | None:
    return found.forecast.tokens_per_s if found.forecast else None


def with_stacks(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The stacks of all threads go into the log while it works."""
    faulthandler.dump_traceback_later(_STACKS_EVERY_S, repeat=True)
    try:
        return work()
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    given = parse()
    os.environ.setdefault(*ALLOCATOR)
    ends = time.monotonic() + given.seconds
    given.logs.mkdir(parents=True, exist_ok=True)
    import_torch()
    works = {
        "ours": partial(measure_ours, given, offload=True),
        "none": partial(measure_ours, given, offload=False),
        "plain": partial(measure_plain, given),
    }
    calls = [
        Call(partial(with_stacks, works[name]), given.logs / f"offload-{name}.log")
        for name in given.runs
    ]
    results: dict[str, Any] = {
        "machine": {"gpu": given.gpu, "driver": driver(), **versions()},
        "asked": {
            name: getattr(given, name)
            for name in ("model", "layers", "micro_batch", "accumulation", "steps", "at_once")
        },
        "runs": {},
    }
    for index, answer in run_calls(calls, at_once=given.at_once, ends=ends):
        name = given.runs[index]
        results["runs"][name] = answer.value or {"problem": answer.problem}
        print(f"{name}: {results['runs'][name]} ({answer.took_s:.0f} s)", flush=True)
        log = calls[index].log.read_text("utf-8").splitlines() if answer.took_s else []
        said = [line for line in log if line.startswith("step ")] if answer.value else log
        print("\n".join(said[-_LAST_LINES:]), flush=True)
        if given.json:
            given.json.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")
    speeds = {name: run["tok_s"] for name, run in results["runs"].items() if "tok_s" in run}
    for name in ("plain", "none"):
        if {"ours", name} <= speeds.keys():
            print(f"ours / {name}: {speeds['ours'] / speeds[name]:.2f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.2-3b", choices=PRESETS)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--runs", nargs="+", default=RUNS, choices=RUNS)
    parser.add_argument("--steps", type=int, default=2, help="measured, after one more")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--at-once", type=int, default=1, help="runs; more show no times")
    parser.add_argument("--seconds", type=float, default=600, help="after which nothing runs")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("runs/offload"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
