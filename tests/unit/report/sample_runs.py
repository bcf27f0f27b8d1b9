"""Run directories made by hand: what training would have left, without the training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from shardwise.checkpoint.durable_files import Fingerprint
from shardwise.checkpoint.manifest import Manifest
from shardwise.config.load import load_config
from shardwise.config.plain import dump_yaml
from shardwise.launch.prepare import choose_plan
from shardwise.plan.planned import Plan

BEGAN = 1_790_000_000.0
LLAMA = "model: llama-3.1-8b\ndata: {source: synthetic, seq_len: 4096}\ncluster: 8xH100\n"


def plan_of(folder: Path, *overrides: str, text: str = LLAMA) -> Plan:
    file = folder / "run.yaml"
    file.write_text(text)
    return choose_plan(load_config(file, [f"runs_dir={folder}", *overrides]), {})


def step_event(plan: Plan, step: int, at: float, *, slow: float = 1.0, seed: int = 0) -> Any:
    """A step near its plan: `slow` is how much longer than planned it took."""
    noise = random.Random(1000 * seed + step)
    forecast = plan.forecast
    planned_s = forecast.step_s if forecast else 0.7
    step_s = planned_s * slow * (1 + 0.02 * noise.gauss(0, 1))
    speed = plan.tokens_per_step / step_s / plan.world_size
    mfu = forecast.mfu * planned_s / step_s if forecast and forecast.mfu else None
    held = round(plan.memory.allocated * (0.985 + 0.01 * min(1.0, step / 30)))
    return {
        "event": "step",
        "time": at,
        "step": step,
        "num_steps": plan.config.train.steps,
        "loss": 2.1 + 8.5 * math.exp(-step / 60) + 0.05 * noise.gauss(0, 1),
        "grad_norm": 0.6 + 3 * math.exp(-step / 20) + 0.1 * noise.random(),
        "lr": 3e-4 * min(1.0, step / 40),
        "step_s": step_s,
        "tokens": step * plan.tokens_per_step,
        "tokens_per_s": speed,
        "tokens_per_s_planned": forecast.tokens_per_s if forecast else None,
        "efficiency": None if mfu is None else {"mfu": mfu, "hfu": mfu},
        "mfu_planned": forecast.mfu if forecast else None,
        "memory": {"allocated": held, "reserved": round(held * 1.03)},
        "memory_capacity": plan.cluster.memory_bytes,
        "memory_planned": plan.memory.reserved,
        "data_share": 0.01 + 0.01 * noise.random(),
        "eta_s": 100.0,
    }


class SampleRun:
    """Writes events as time passes."""

    def __init__(self, plan: Plan, *, slow: float = 1.0, seed: int = 0) -> None:
        self.plan = plan
        self.slow = slow
        self.seed = seed
        self.now = BEGAN
        self.events: list[dict[str, Any]] = []

    def say(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, "time": self.now, **fields})

    def start(self, step: int) -> None:
        self.say("data", tokens=10**9, tokenizer="byte", skipped=[])
        if step:
            self.say("resume", step=step, written_by=8)
        self.now += 40
        self.say("start", step=step, world_size=self.plan.world_size)

    def train(self, first: int, last: int, *, every: int = 10, save: int = 50) -> None:
        """Steps `first` to `last`; the first one of a start compiles."""
        compiles = self.events[-1]["event"] in ("start", "eval")
        done = first - 1
        for step in range(first, last + 1):
            if step != first and step % every and step != last:
                continue
            slow = self.slow * (9.0 if step == first and compiles else 1.0)
            event = step_event(self.plan, step, 0.0, slow=slow, seed=self.seed)
            self.now += event["step_s"] * (step - done)
            done = step
            self.events.append({**event, "time": self.now})
            if step % save == 0:
                self.say("eval", step=step, loss=event["loss"] + 0.08)
                self.say("checkpoint", step=step, stage_s=2.5, write_s=21.0, commit_s=0.2,
                         error=None)  # fmt: skip

    def collectives(self, step: int) -> None:
        rows = [
            {"kind": kind, "phase": phase, "count": 320, "p50_s": p50 * (1 + 0.1 * (step % 3)),
             "p99_s": 3 * p50, "bytes": 4 * 10**9, "bus_bytes_per_s": 3.1e11,
             "slowest_unit": "layers.7"}
            for kind, phase, p50 in (
                ("all_gather", "forward", 0.0009),
                ("all_gather", "backward", 0.0011),
                ("reduce_scatter", "backward", 0.0021),
            )
        ]  # fmt: skip
        self.say("collectives", step=step, rows=rows, straggler={"rank": 3, "behind_s": 0.012})

    def profile(self, step: int) -> None:
        rows = [{"name": "all_gather", "unit": "-", "calls": 66.0, "seconds": 0.2,
                 "exposed_s": 0.03}]  # fmt: skip
        self.say("profile", step=step, steps=3, rank=0, step_s=0.8, compute_share=0.9,
                 exposed_share=0.05, copies_share=0.0, idle_share=0.05, communication_s=0.2,
                 rows=rows, gaps=12.0, trace="profile/step-160-rank-0.json.gz")  # fmt: skip

    def write(self) -> Path:
        folder = self.plan.run_dir
        folder.mkdir(parents=True, exist_ok=True)
        self.plan.save(folder / "plan.json")
        (folder / "config.yaml").write_text(dump_yaml(self.plan.config))
        lines = "".join(json.dumps(event) + "\n" for event in self.events)
        (folder / "events.jsonl").write_text(lines)
        return folder


GATES = [
    {"name": "mfu", "figure": "51.2%", "bound": "at least 45%", "verdict": "pass", "advice": ""},
    {"name": "loss falls", "figure": "10.6 -> 2.1", "bound": "falls", "verdict": "pass",
     "advice": ""},
    {"name": "data wait", "figure": 0.12, "bound": 0.05, "verdict": "fail",
     "advice": "raise data.workers, or move the data to a local disk"},
    {"name": "fabric", "figure": None, "bound": None, "verdict": "skip",
     "advice": "one node only"},
]  # fmt: skip


def eventful(plan: Plan, *, slow: float = 1.0, seed: int = 0) -> SampleRun:
    """A run with a death, a restart from step 150, a bad batch, and an end at step 300."""
    run = SampleRun(plan, slow=slow, seed=seed)
    run.start(0)
    run.say("eval", step=0, loss=11.9)
    run.train(1, 180)
    for step in range(20, 181, 20):
        run.collectives(step)
    run.now += 90
    run.say(
        "restart", reason="rank 5 failed: killed by signal SIGKILL", number=1,
        why="SIGKILL: the kernel ran out of memory, or someone killed it (see dmesg)",
    )  # fmt: skip
    run.now += 20
    run.start(150)
    run.train(151, 260)
    run.profile(162)
    run.say("nonfinite", step=261, batch=260, sequences=[66560, 66816], in_a_row=1)
    run.train(261, 300)
    for step in range(160, 301, 20):
        run.collectives(step)
    run.say("gates", gates=GATES)
    run.say("end", step=300, finished=True, loss=2.1)
    return run


def keep_checkpoints(folder: Path, *steps: int) -> None:
    """Checkpoint directories of a few bytes with whole manifests."""
    for step in steps:
        place = folder / "checkpoints" / f"step-{step:08d}"
        place.mkdir(parents=True)
        (place / "rank-00000.bin").write_bytes(b"weights")
        manifest = Manifest(
            step=step, position=step, tokens=step * 2**20, loss=2.5, global_batch=256, seed=0,
            world_size=8, loss_scale=None, created=BEGAN + 10 * step,
            versions={"shardwise": "0.1.0", "torch": "2.11.0", "transformers": "5.22.0",
                      "python": "3.12.4"},
            files={"rank-00000.bin": Fingerprint(7, "0" * 64)},
        )  # fmt: skip
        (place / "manifest.json").write_bytes(manifest.to_bytes())


def circles(page: str, plot: str) -> list[str]:
    """The points that a plot has, as markup."""
    begin = page.index(f'id="plot-{plot}"')
    return page[begin : page.index("</svg>", begin)].split("<circle ")[1:]
