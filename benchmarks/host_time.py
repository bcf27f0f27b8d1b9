"""What a block's forward and backward take the host, measured where the GPU is never late.

    python benchmarks/host_time.py [--rows llama-3.1-8b/qlora/1-full ...] [--json FILE] [--profile]

A row is a preset, what is trained (`plain`, or LoRA over a base in bf16, NF4 or float8: `lora`,
`qlora`, `float8`), the number of ranks and the recompute: one GPU as rank 0, links take no time.
The model has narrow layers and 128 tokens, so kernels are short, and as many of them as wide layers
have. Each row runs with few blocks and with more; the difference is that of the blocks alone. Rows
compile side by side, but one at a time is measured.

With --profile the log of a row has Python's functions by their own time, and the launches of a
block by their names.
"""

from __future__ import annotations

import argparse
import cProfile
import fcntl
import json
import os
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from adapter_rows import EXPERTS, RANK, share_of
from family_forks import Call, run_calls
from forked_measures import import_torch, plan_of
from gpu import driver, versions
from shardwise.facts.allocator import ALLOCATOR
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.presets import PRESETS
from shardwise.plan.planned import Plan

ROWS = (
    *("llama-3.1-8b/plain/1/none", "llama-3.1-8b/plain/8/none", "llama-3.1-8b/plain/8/full"),
    *("llama-3.1-8b/lora/1/none", "llama-3.1-8b/qlora/1/none", "llama-3.1-8b/qlora/1/full"),
    *("llama-3.1-8b/float8/1/none", "llama-3.1-8b/qlora/8/none", "qwen3-30b-a3b/plain/8/none"),
)
BASES = {"plain": "", "lora": "param", "qlora": "nf4", "float8": "float8"}
_NARROW = {"num_attention_heads": 8, "vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0}
_DEPTHS = (4, 12)
_TOKENS = 128
_MOST_NAMED = 40


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run blocks."""

    model: str
    method: str
    world: int
    recompute: str

    @classmethod
    def parse(cls, text: str) -> Row:
        """Raises ValueError where the text is no row."""
        model, method, world, recompute = text.split("/")
        if model not in PRESETS or method not in BASES:
            raise ValueError(f"{text!r} is no preset/METHOD/ranks/recompute")
        return cls(model, method, int(world), recompute)

    def __str__(self) -> str:
        return f"{self.model}/{self.method}/{self.world}/{self.recompute}"


def plan_row(row: Row, layers: int, given: argparse.Namespace) -> Plan:
    """The plan of a row with so many narrow layers."""
    on_cpu = given.device == "cpu"
    width = 64 if on_cpu else 1024
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    overrides: dict[str, object] = {**_NARROW, **sizes}
    adapter: dict[str, object] = {}
    if BASES[row.method]:
        has_experts = "num_experts" in PRESETS[row.model]
        targets = {"targets": ["all-linear", EXPERTS]} if has_experts else {}
        adapter = {"method": "lora", "rank": RANK, "base": BASES[row.method], **targets}
    memory = {"checkpoint_activations": share_of(row.recompute)}
    return plan_of(
        parse_cluster(f"{row.world}x{'CPU' if on_cpu else given.gpu}"),
        {
            "model": {"name": row.model, "overrides": overrides},
            "data": {"seq_len": _TOKENS},
            "memory": {**memory, **({"compile": False} if on_cpu else {})},
            "precision": {"param": "fp32"} if on_cpu else {},
            "train": {"micro_batch": 1, "accumulation": 1},
            **({"adapter": adapter} if adapter else {}),
            **({"shard": {"strategy": "full_shard"}} if row.world > 1 else {}),
        },
    )


def measure(row: Row, given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the host for one block."""
    from shardwise.training.surroundings import prepare_matmuls

    plans = [plan_row(row, layers, given) for layers in _DEPTHS]
    prepare_matmuls(plans[0])
    few, many = (_host_ms(plan, row, given) for plan in plans)
    more = _DEPTHS[1] - _DEPTHS[0]
    found = {name: round((many[name] - few[name]) / more, 3) for name in many}
    return {**found, "rest_ms": round(few["step_ms"] - _DEPTHS[0] * found["step_ms"], 2)}


def _host_ms(plan: Plan, row: Row, given: argparse.Namespace) -> dict[str, float]:
    import torch

    from shardwise.training.surroundings import fast_attention
    from shardwise.tunnel.emulate import Emulator
    from shardwise.tunnel.emulated_links import Links
    from shardwise.tunnel.link_clock import CudaClock, HostClock
    from shardwise.tunnel.rank_zero import fill_rank, plan_on, shard_rank
    from shardwise.tunnel.world import rank_zero_of

    on_gpu = given.device == "cuda"
    here = plan_on(plan, given.device, compiled=on_gpu)
    clock = CudaClock() if on_gpu else HostClock()
    emulator = Emulator(Links.of(plan.cluster.fabric, inf), clock, free=True)
    with rank_zero_of(row.world), fast_attention(torch.device(given.device)):
        rank = fill_rank(shard_rank(here, emulator), print, has_values=True)
        began: list[tuple[str, float]] = []
        note = partial(_note, began)
        rank.stepper.on_phase = rank.stepper.passes.on_phase = note  # type: ignore[attr-defined]

        def step(number: int) -> None:
            batches = rank.loader.step_batches(number)
            rank.stepper.run([batch.pinned() for batch in batches] if on_gpu else batches, 0.0)

        step(0)
        step(1)
        with one_at_a_time(given.logs):
            found = _timed(step, began, given.steps)
            if given.profile and plan.model.num_layers == _DEPTHS[1]:
                _profile(step, on_gpu=on_gpu)
    return found


def _note(began: list[tuple[str, float]], phase: str) -> None:
    began.append((phase, time.perf_counter()))


def _timed(step: Any, began: list[tuple[str, float]], steps: int) -> dict[str, float]:
    """Medians of what the host takes for forward, for backward and for a step."""
    times: dict[str, list[float]] = {"forward_ms": [], "backward_ms": [], "step_ms": []}
    for number in range(2, 2 + steps):
        began.clear()
        start = time.perf_counter()
        step(number)
        times["step_ms"].append(time.perf_counter() - start)
        at = {phase: when for phase, when in began}
        # Ranks agree before the first pass and after the last.
        times["forward_ms"].append(at["backward"] - at["forward"])
        times["backward_ms"].append(at["agree"] - at["backward"])
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def _profile(step: Any, *, on_gpu: bool) -> None:
    """Say where the host's time goes. The profiler makes Python's own part two to three times as
    long."""
    import torch

    watched = cProfile.Profile()
    watched.enable()
    step(90)
    watched.disable()
    print(f"Python's functions by own time, {_DEPTHS[1]} blocks, forward and this thread alone")
    pstats.Stats(watched).sort_stats("tottime").print_stats(_MOST_NAMED)
    pstats.Stats(watched).sort_stats("cumulative").print_stats(_MOST_NAMED)
    if not on_gpu:
        return
    with torch.profiler.profile() as trace:
        step(91)
        torch.cuda.synchronize()
    events = trace.events() or []
    names = Counter(event.name for event in events if "aunch" in event.name)
    print(f"launches of {_DEPTHS[1]} blocks: {dict(names)}", flush=True)
    table = trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=_MOST_NAMED)
    print(table, flush=True)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Inside, no other row measures."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    given = parse()
    os.environ.setdefault(*ALLOCATOR)
    given.logs.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + given.seconds
    import_torch()
    rows = [Row.parse(text) for text in given.rows]
    calls = [
        Call(partial(measure, row, given), given.logs / f"{str(row).replace('/', '-')}.log")
        for row in rows
    ]
    results: dict[str, Any] = {
        "machine": {"gpu": given.gpu, "driver": driver(), **versions()},
        "rows": {},
    }
    for index, answer in run_calls(calls, at_once=given.at_once, ends=ends):
        name = str(rows[index])
        results["rows"][name] = answer.value or {"problem": answer.problem}
        print(f"{name:<32} {results['rows'][name]} ({answer.took_s:.0f} s)", flush=True)
        if given.json:
            given.json.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--at-once", type=int, default=9, help="rows that compile side by side")
    parser.add_argument("--seconds", type=float, default=150, help="after which nothing runs")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("runs/host"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
