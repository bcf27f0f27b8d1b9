"""Adapters on one GPU: the plan beside what is measured, and PEFT under Hugging Face Trainer.

    python benchmarks/adapters.py [--rows 'llama-3.1-8b/lora/2-none@4096' ...] [--steps 4]
        [--peers plain liger compile ...] [--seconds 460] [--json FILE]
    python benchmarks/adapters.py --plan-only
    python benchmarks/adapters.py --table FILE ...

A row is a model, `lora`, `qlora` (NF4) or `float8` (frozen weights in float8), and a setting of
families.py: rank 16 on all linear layers, those of experts too, on random tokens and random
weights. `--peers` runs the same by PEFT: `plain`, or words such as compile and liger; `qlora` takes
bitsandbytes' layers there, `float8` bf16 as `lora` does. A row that fails says why. FILE is written
after every row, and rows that it holds already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from family_forks import Call, run_calls
from family_list import Case
from family_rows import OURS, PLAIN, measure_row, planned
from family_run import Board
from family_table import (
    count,
    gib,
    line_of,
    memory_error,
    plain,
    share,
    signed,
    speed_error,
    summary,
    table,
)
from forked_measures import import_ahead, import_torch, plan_of
from gpu import driver, versions
from shardwise.facts.allocator import ALLOCATOR
from shardwise.facts.cluster import parse_cluster
from shardwise.facts.presets import PRESETS
from shardwise.plan.plan import Plan
from shardwise.units import GIB

RANK = 16
EXPERTS = "experts.*"
# Compiling takes longest; nothing else does.
_ROW_S = 240.0
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


def plan(row: Row, gpu: str) -> Plan:
    return plan_of(parse_cluster(f"1x{gpu}"), sections_of(row, tiny=gpu == "CPU"))


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


def measure(row: Row, given: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    if row.who != OURS:
        return measure_peft(row, given.steps, given.device)
    found = plan(row, given.gpu)
    said = planned(found)
    return said if given.plan_only else said | measure_row(found, given.device, given.steps, None)


def main() -> None:
    given = parse()
    os.environ.setdefault(*ALLOCATOR)
    if given.table:
        print("\n\n".join(markdown(json.loads(path.read_text("utf-8"))) for path in given.table))
        return
    ends = time.monotonic() + given.seconds
    rows = rows_of(given)
    if not rows:
        sys.exit("no row has all of these names")
    given.logs.mkdir(parents=True, exist_ok=True)
    import_torch()
    if given.device == "cuda":
        import_ahead({PRESETS[row.model]["model_type"] for row in rows})
    board = Board.open(given.json, {"gpu": given.gpu, "driver": driver(), **versions()})
    new = [row for row in rows if not board.holds(row)]
    logs = (given.logs / f"{str(row).replace('/', '_')}.log" for row in new)
    calls = [Call(partial(measure, row, given), log) for row, log in zip(new, logs, strict=True)]
    for index, answer in run_calls(calls, limit_s=_ROW_S, ends=ends):
        row, found = new[index], answer.value or {"problem": answer.problem}
        board.put(row, {**found, "took_s": round(answer.took_s, 1)})
        said = line_of({**row.names, **found}) if "reserved_gib" in found or answer.problem else row
        print(f"{said}   ({answer.took_s:.0f} s)", flush=True)
    print(f"\n{markdown(board.results)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=["*"], help="rows, or patterns of the usual")
    parser.add_argument("--peers", nargs="+", default=[], metavar="MODE")
    parser.add_argument("--steps", type=int, default=4, help="measured in each row")
    parser.add_argument("--seconds", type=float, default=3600, help="after which nothing runs")
    parser.add_argument("--plan-only", action="store_true", help="run nothing, needs no GPU")
    parser.add_argument("--gpu", default="H200", help="that plans are for")
    parser.add_argument("--json", type=Path, help="results, written after every row")
    parser.add_argument("--logs", type=Path, default=Path("runs/adapters"), help="what rows said")
    parser.add_argument("--table", nargs="+", type=Path, help="only print results")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the code, no more"
    )
    given = parser.parse_args()
    if given.device == "cpu" and not given.plan_only:
        given.gpu = "CPU"
    return given


def rows_of(given: argparse.Namespace) -> list[Row]:
    """Rows of the list that match, and those that are named in full; each then by the peers."""
    usual = [text for text in ROWS if any(fnmatch(text, pattern) for pattern in given.rows)]
    named = [text for text in given.rows if "*" not in text and text not in ROWS]
    ours = [Row.parse(text) for text in (*usual, *named)]
    if given.gpu == "CPU":
        ours = list(dict.fromkeys(row.tiny() for row in ours))
    return [replace(row, who=who) for row in ours for who in (OURS, *given.peers)]


_HEAD = (
    *("row", "plan GiB", "reserved", "error", "plan tok/s", "tok/s", "error", "MFU", "ours ÷ it"),
    "problem",
)


def markdown(data: Mapping[str, Any]) -> str:
    """All of a file of results."""
    rows: Sequence[Mapping[str, Any]] = data["rows"]
    ours = [row for row in rows if row["who"] == OURS]
    speeds = {row["row"]: row.get("tok_s") for row in ours}
    machine = ", ".join(f"{name} {value}" for name, value in data["machine"].items() if value)
    return "\n\n".join(
        (f"{machine}.", table(_HEAD, (_cells(row, speeds) for row in rows)), summary(ours))
    )


def _cells(row: Mapping[str, Any], speeds: Mapping[str, float | None]) -> list[str]:
    mine = speeds.get(row["row"].removesuffix(f"/{row['who']}")) if row["who"] != OURS else None
    return [
        row["row"],
        *(gib(row.get("plan_gib")), gib(row.get("reserved_gib")), signed(memory_error(row))),
        *(count(row.get("plan_tok_s")), count(row.get("tok_s")), signed(speed_error(row))),
        share(row.get("mfu")),
        f"{mine / row['tok_s']:.2f}" if mine and row.get("tok_s") else "-",
        plain(row.get("problem", "")),
    ]


if __name__ == "__main__":
    main()
