"""A row of the scoreboard of adapters: which run it is, what is planned, and what is measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from family_list import FAMILIES, Case
from family_profile import read_kernels
from family_rows import OURS, PLAIN, measure_row, shortest
from forked_measures import plan_of
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.presets import PRESETS
from shardwise.plan.planned import Plan
from shardwise.units import GIB

RANK = 16
EXPERTS = "experts.*"
ROWS = (
    *("llama-3.1-8b/lora/2-none@4096", "llama-3.1-8b/lora/4-none@4096"),
    *("llama-3.1-8b/lora/4-selective@4096", "llama-3.1-8b/lora/2-full@8192"),
    *("llama-3.1-8b/float8/2-none@4096", "llama-3.1-8b/float8/4-none@4096"),
    *("llama-3.1-8b/qlora/1-none@2048", "llama-3.1-8b/qlora/4-none@4096"),
    *("qwen3-8b/lora/2-none@4096", "gemma-3-12b/lora/2-selective@4096"),
    *("qwen3-30b-a3b/lora/2-selective@4096", "qwen3-30b-a3b/qlora/2-none@4096"),
    *("llama-3.1-70b/qlora/1-0.5@4096", "llama-3.1-70b/qlora/2-0.5@4096"),
    *("llama-3.1-70b/qlora/1-full@4096", "llama-3.1-70b/lora/1-full@2048"),
)
_BASES = {"lora": "param", "qlora": "nf4", "float8": "float8"}
# What stands for a model where the code is only tried.
_TINY = {False: "tiny-llama", True: "tiny-mixtral"}


@dataclass(frozen=True, slots=True)
class Row:
    """One run: a model, its adapters and a setting, by us or by a mode of Trainer with PEFT."""

    model: str
    method: str
    case: Case
    who: str = OURS

    @classmethod
    def parse(cls, text: str) -> Row:
        """Raises ValueError where the text is no row."""
        model, method, case = text.split("/")
        if model not in PRESETS or method not in _BASES:
            raise ValueError(f"{text!r} is no preset/METHOD/setting: METHOD is {', '.join(_BASES)}")
        return cls(model, method, Case.parse(case))

    def __str__(self) -> str:
        who = "" if self.who == OURS else f"/{self.who}"
        return f"{self.model}/{self.method}/{self.case}{who}"

    @property
    def names(self) -> dict[str, Any]:
        """As the results have them."""
        return {
            "row": str(self),
            "family": self.model,
            "method": self.method,
            "setting": str(self.case),
            "who": self.who,
            "world": 1,
            "seen": True,
        }

    @property
    def has_experts(self) -> bool:
        """Whether its experts are stacked in one tensor."""
        fields = PRESETS[self.model]
        return any(name in fields for name in ("num_experts", "num_local_experts"))

    @property
    def least_layers(self) -> int:
        """The fewest that hold every kind of block, one that is recomputed among them."""
        kinds = FAMILIES[self.model].least if self.model in FAMILIES else 1
        return max(kinds, 2 if self.case.setting.recompute[0].isdigit() else 1)

    def tiny(self) -> Row:
        """The same for CPUs."""
        return replace(self, model=_TINY[self.has_experts], case=self.case.tiny())


def sections_of(row: Row, *, tiny: bool) -> dict[str, dict[str, object]]:
    """The configuration of one of ours."""
    setting, targets = row.case.setting, ["all-linear", EXPERTS] if row.has_experts else None
    memory: dict[str, object] = {"checkpoint_activations": share_of(setting.recompute)}
    if setting.in_host:
        memory["offload_activations"] = setting.in_host
    return {
        "model": {"name": row.model},
        "data": {"seq_len": row.case.seq_len},
        "adapter": {
            "method": "lora",
            "rank": RANK,
            **({"targets": targets} if targets else {}),
            "base": _BASES[row.method],
        },
        "memory": {**memory, **({"compile": False} if tiny else {})},
        "precision": {"param": "fp32"} if tiny else {},
        "train": {"micro_batch": setting.micro_batch, "accumulation": 1},
    }


def share_of(recompute: str) -> str | float:
    """A mode, or the share of the blocks."""
    return float(recompute) if recompute[0].isdigit() else recompute


def plan_row(row: Row, gpu: str) -> Plan:
    """The plan of this run on one GPU."""
    return plan_of(parse_cluster(f"1x{gpu}"), sections_of(row, tiny=gpu == "CPU"))


def compile_row(plan: Plan, row: Row, device: str) -> dict[str, Any]:
    """One step with the fewest layers, so that the compiler's results are on disk."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    return measure_row(shortest(plan, row.least_layers), device, 1, None)


def measure_ours(plan: Plan, device: str, steps: int, trace: Path | None) -> dict[str, Any]:
    """Run it; a trace is read and removed."""
    found = measure_row(plan, device, steps, trace)
    if trace is not None:
        found["kernels"] = read_kernels(trace)
        trace.unlink()
    return found


def measure_peft(row: Row, steps: int, device: str) -> dict[str, Any]:
    """Run the same by PEFT under Trainer."""
    import torch

    from peers.adapters import step_times
    from shardwise.metrics.meters import peak_memory

    words = () if row.who == PLAIN else tuple(row.who.split("-"))
    setting = replace(row.case.setting, words=words)
    times = step_times(
        PRESETS[row.model],
        setting,
        row.case.seq_len,
        steps,
        device,
        rank=RANK,
        in_four_bits=row.method == "qlora",
    )
    step_s, peak = statistics.median(times), peak_memory(torch.device(device))
    return {
        "step_ms": 1e3 * step_s,
        "tok_s": row.case.tokens / step_s,
        "allocated_gib": peak.allocated / GIB,
        "reserved_gib": peak.reserved / GIB,
    }
