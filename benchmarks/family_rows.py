"""A row of the scoreboard: which run it is, what the plan says of it, and what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from family_list import FAMILIES, Case, cut_config
from shardwise.config.plain import config_from_dict
from shardwise.facts.calibration import rates_for
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.models import ModelSource
from shardwise.launch.prepare import measure_model
from shardwise.plan.choose import choose_plan
from shardwise.plan.planned import Forecast, Plan
from shardwise.units import GIB

OURS = "ours"
# Trainer as it comes.
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Row:
    """One run: a family on so many ranks with a setting, by us or by a mode of Trainer."""

    family: str
    world: int
    case: Case
    who: str = OURS

    def __str__(self) -> str:
        who = "" if self.who == OURS else f"/{self.who}"
        return f"{self.family}/{self.world}/{self.case}{who}"

    @property
    def names(self) -> dict[str, Any]:
        """As the results have them."""
        family = FAMILIES[self.family]
        return {
            "row": str(self),
            "family": self.family,
            "seen": family.seen,
            "world": self.world,
            "setting": str(self.case),
            "who": self.who,
            "layers": family.layers[self.world],
        }


def config_of(row: Row, *, tiny: bool) -> dict[str, Any]:
    """The model's config.json."""
    family = FAMILIES[row.family]
    return family.tiny() if tiny else family.cut(family.layers[row.world])


def plan_row(row: Row, cluster: ClusterSpec, *, tiny: bool) -> Plan:
    """The plan of this run on random tokens."""
    config = config_from_dict(_sections(row, tiny=tiny))
    source = ModelSource(
        name=row.family, hf_config=config_of(row, tiny=tiny), directory=None, kind="preset"
    )
    spec = measure_model(config, source)
    return choose_plan(config, spec, cluster, source, rates_for(cluster))


def _sections(row: Row, *, tiny: bool) -> dict[str, Any]:
    setting = row.case.setting
    memory: dict[str, Any] = {"checkpoint_activations": setting.recompute}
    precision: dict[str, Any] = {"linear": "float8"} if setting.precision == "float8" else {}
    if setting.in_host:
        memory["offload_activations"] = setting.in_host
    if tiny:
        memory["compile"], precision["param"] = False, "fp32"
    sections: dict[str, Any] = {
        "model": {"name": row.family},
        "data": {"source": "synthetic", "seq_len": row.case.seq_len},
        "memory": memory,
        "precision": precision,
        "train": {"micro_batch": setting.micro_batch, "accumulation": 1},
    }
    if row.world > 1:
        strategy = "shard_grad_op" if "keep" in setting.words else "full_shard"
        sections["shard"] = {"strategy": strategy}
    return sections


def planned(plan: Plan) -> dict[str, Any]:
    """What the plan says, in the words of the results."""
    memory, forecast = plan.memory, plan.forecast
    # torch reserves neither CUDA's context nor NCCL's buffers, which are a part of the total.
    outside = memory.total - plan.peak_bytes
    return {
        "params": plan.model.total_params,
        "attention": plan.decided.attention,
        "plan_gib": plan.peak_bytes / GIB,
        "plan_low_gib": (memory.low - outside) / GIB,
        "plan_high_gib": (memory.high - outside) / GIB,
        "plan_total_gib": memory.total / GIB,
        "plan_allocated_gib": memory.allocated / GIB,
        "plan_peak": memory.peak,
        # Links take no time here, so nothing waits for them.
        "plan_tok_s": forecast.tokens_per_s / _beside(forecast) if forecast else None,
        "plan_terms_ms": _terms(forecast.terms) if forecast else {},
    }


def _beside(forecast: Forecast) -> float:
    """The share of a step that is left where links take no time."""
    return 1 - forecast.terms["exposed"] / forecast.step_s


def _terms(terms: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e3 * seconds, 2) for name, seconds in terms.items() if seconds}


def shortest(plan: Plan, layers: int) -> Plan:
    """The same plan for a model of the fewest layers: the compiler makes the same graphs for it."""
    hf_config = cut_config(plan.hf_config, layers)
    return replace(plan, hf_config=hf_config, model=replace(plan.model, num_layers=layers))


def shortest_bytes(plan: Plan, layers: int) -> float:
    """About what the shortest model needs."""
    model, memory = plan.model, plan.memory
    in_blocks = min(1.0, model.num_layers * model.block_params / model.total_params)
    gone = 1 - layers / model.num_layers
    return memory.total - gone * (
        memory.activations + in_blocks * (memory.params + memory.optimizer)
    )


def measure_row(plan: Plan, device: str, steps: int, trace: Path | None) -> dict[str, Any]:
    """Run it as rank 0 over links that take no time, or alone."""
    from shardwise.tunnel.tunnel_run import run_tunnel

    result = run_tunnel(plan, where=device, link_speed=inf, num_steps=steps, trace=trace)
    memory, timing = result.memory, result.timing
    assert timing is not None
    reserved = memory.reserved_bytes
    return {
        "step_ms": 1e3 * timing.step_s,
        "tok_s": timing.tokens_per_s_per_gpu,
        "mfu": timing.mfu,
        "allocated_gib": memory.allocated_bytes / GIB,
        "reserved_gib": None if reserved is None else reserved / GIB,
        "notes": result.notes,
    }


def measure_trainer(
    row: Row, hf_config: Mapping[str, Any], steps: int, device: str
) -> dict[str, Any]:
    """Run the same with Hugging Face Trainer."""
    import torch

    from peers.trainer import step_times
    from shardwise.metrics.meters import peak_memory

    case = row.case
    words = () if row.who == PLAIN else tuple(row.who.split("-"))
    setting = replace(case.setting, words=words)
    step_s = statistics.median(step_times(hf_config, setting, case.seq_len, steps, device))
    peak = peak_memory(torch.device(device))
    return {
        "step_ms": 1e3 * step_s,
        "tok_s": case.tokens / step_s,
        "allocated_gib": peak.allocated / GIB,
        "reserved_gib": peak.reserved / GIB,
    }
