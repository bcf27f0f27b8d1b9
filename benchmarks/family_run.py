"""Runs the rows of the scoreboard: plans first, then limits, then one row after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from family_forks import Answer, Call, run_calls
from family_limits import kernels_of, limit_s, measure_kernels
from family_list import FAMILIES
from family_profile import read_kernels
from family_rows import (
    OURS,
    Row,
    config_of,
    measure_row,
    measure_trainer,
    plan_row,
    planned,
    shortest,
    shortest_bytes,
)
from family_table import line_of
from family_work import SeenWork, see_work
from forked_measures import import_ahead, import_torch
from gpu import driver, versions
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec, parse_cluster
from shardwise.facts.flops import flops_per_token
from shardwise.files import replace_file
from shardwise.plan.planned import Plan

# Of the device's memory, for rows that compile at the same time.
_ROOM = 0.85
# No row takes longer, unless something hangs.
_ROW_S = 150.0
# What a row has no more where others ran beside it.
_TIMES = ("step_ms", "tok_s", "mfu", "limit_tok_s")


class Named(Protocol):
    """A row of a scoreboard. Its text is its name."""

    @property
    def names(self) -> dict[str, Any]:
        """What it is, as the results have it."""


@dataclass(frozen=True, slots=True)
class Board:
    """The results so far, said and written down as they come: a run may be ended at any time."""

    results: dict[str, Any]
    file: Path | None

    @classmethod
    def open(cls, file: Path | None, machine: dict[str, Any]) -> Board:
        """With the rows that the file holds."""
        known = json.loads(file.read_text("utf-8"))["rows"] if file and file.exists() else []
        return cls({"machine": machine, "rows": known}, file)

    def holds(self, row: Named) -> bool:
        """Whether it was measured."""
        return any(each["row"] == str(row) and "tok_s" in each for each in self.results["rows"])

    def put(self, row: Named, found: dict[str, Any]) -> None:
        """Write one down, in the place of an earlier one of the same name."""
        rows, new = self.results["rows"], {**row.names, **found}
        known = [place for place, each in enumerate(rows) if each["row"] == str(row)]
        if known:
            rows[known[0]] = new
        else:
            rows.append(new)
        self.write()

    def has_failed(self, row: Named) -> bool:
        """Whether it was run, and said why it gave nothing."""
        return any(each["row"] == str(row) and each.get("problem") for each in self.results["rows"])

    def write(self) -> None:
        """Write all down."""
        if self.file:
            replace_file(self.file, f"{json.dumps(self.results, indent=1)}\n".encode())


@dataclass(slots=True, kw_only=True)
class Bench:
    """Plans and measures on this device."""

    device: str
    gpu: str
    steps: int
    warm: int
    logs: Path
    profile: bool
    ends: float
    plans: dict[Row, Plan] = field(default_factory=dict)
    works: dict[tuple[str, int], SeenWork] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each kernel that limits are made of."""

    @property
    def tiny(self) -> bool:
        """Whether models are only tried, not measured."""
        return self.device == "cpu"

    def machine(self) -> dict[str, Any]:
        """What the results are of."""
        return {"gpu": "CPU" if self.tiny else self.gpu, "driver": driver(), **versions()}

    def cluster(self, world: int) -> ClusterSpec:
        """So many of these devices."""
        return parse_cluster(f"{world}x{'CPU' if self.tiny else self.gpu}")

    def plan(self, rows: Sequence[Row], board: Board) -> None:
        """Plan all rows, a process for each model; a row that cannot be planned says why."""
        import_torch()
        if not self.tiny:
            import_ahead({FAMILIES[row.family].config["model_type"] for row in rows})
        places = list(dict.fromkeys((row.family, row.world) for row in rows))
        groups = [[row for row in rows if (row.family, row.world) == place] for place in places]
        calls = [
            self._call(f"plan-{family}-{world}", partial(self._plan_all, group))
            for (family, world), group in zip(places, groups, strict=True)
        ]
        found: dict[Row, Plan | str] = {}
        for index, answer in run_calls(calls, at_once=os.cpu_count() or 1, ends=self.ends):
            found |= answer.value or dict.fromkeys(groups[index], answer.problem)
        for row in rows:
            plan = found[row]
            if isinstance(plan, str):
                board.put(row, {"problem": plan})
                continue
            self.plans[row] = plan
            if row.who == OURS:
                board.put(row, planned(plan))
        print(f"{len(self.plans)} of {len(rows)} rows are planned", flush=True)

    def measure_limits(self) -> None:
        """Look at the models that have a plan, and measure each matmul and attention once."""
        places = list(dict.fromkeys((row.family, row.world) for row in self.plans))
        one = {(row.family, row.world): row for row in self.plans}
        calls = [
            self._call(f"work-{family}-{world}", partial(self._see, one[family, world]))
            for family, world in places
        ]
        for index, answer in run_calls(calls, at_once=os.cpu_count() or 1, ends=self.ends):
            if answer.value is None:
                print(f"no limit for {places[index][0]}: {answer.problem}", flush=True)
            else:
                self.works[places[index]] = answer.value
        lengths = {(row.family, row.world, row.case.seq_len) for row in self.plans}
        kernels = {
            kernel
            for family, world, length in sorted(lengths)
            if (family, world) in self.works
            for kernel in kernels_of(self.works[family, world], length)
        }
        flash = any(p.decided.attention == "flash_attention_4" for p in self.plans.values())
        work = partial(measure_kernels, sorted(kernels, key=str), self.device, flash)
        for _, answer in run_calls([self._call("limits", work)], ends=self.ends):
            self.seconds = answer.value or {}
            said = answer.problem or f"{len(self.seconds)} kernels"
            print(f"limits: {said} ({answer.took_s:.0f} s)", flush=True)

    def run(self, rows: Sequence[Row], board: Board, *, compile_only: bool = False) -> None:
        """All rows that have a plan, in groups that are warmed up together."""
        left = [row for row in rows if row in self.plans]
        size = max(1, self.warm)
        for start in range(0, len(left), size):
            group = left[start : start + size]
            if self.warm:
                self._warm_up(group)
            for row in [] if compile_only else group:
                call = self._call(str(row), partial(self._measure, row))
                ((_, answer),) = run_calls([call], limit_s=_ROW_S, ends=self.ends)
                found = self._found(row, answer)
                board.put(row, found)
                print(f"{line_of({**row.names, **found})}   ({answer.took_s:.0f} s)", flush=True)

    def run_for_memory(self, rows: Sequence[Row], board: Board) -> None:
        """As many of ours at once as fit, so that their times mean nothing."""
        left = [row for row in rows if row in self.plans and row.who == OURS]
        calls = [
            self._call(str(row), partial(self._measure, row), 1.1 * self.plans[row].memory.high)
            for row in left
        ]
        options: dict[str, Any] = {"at_once": max(1, self.warm), "room": self._room()}
        for index, answer in run_calls(calls, limit_s=_ROW_S, ends=self.ends, **options):
            found = self._found(left[index], answer)
            kept = {name: value for name, value in found.items() if name not in _TIMES}
            board.put(left[index], kept)
            print(line_of({**left[index].names, **kept}), flush=True)

    def _room(self) -> float:
        return _ROOM * self.cluster(1).memory_bytes

    def _warm_up(self, rows: Sequence[Row]) -> None:
        """Compile the graphs of all of them at once; what fails here will say so in its turn."""
        calls = []
        for row in rows:
            if row.who != OURS:
                continue
            plan, layers = self.plans[row], FAMILIES[row.family].least
            work = partial(_measure_ours, shortest(plan, layers), self.device, 1, None)
            name, needs = f"warm-{row}", shortest_bytes(plan, layers)
            calls.append(self._call(name, work, needs))
        options: dict[str, Any] = {"at_once": self.warm, "room": self._room()}
        done = run_calls(calls, limit_s=_ROW_S, ends=self.ends, **options)
        took = [answer.took_s for _, answer in done]
        if took:
            print(f"compiled {len(took)} rows, the longest in {max(took):.0f} s", flush=True)

    def _measure(self, row: Row) -> dict[str, Any]:
        if row.who != OURS:
            hf_config = config_of(row, tiny=self.tiny)
            return measure_trainer(row, hf_config, self.steps, self.device)
        trace = self.logs / f"{_file_name(row)}.json.gz" if self.profile else None
        found = _measure_ours(self.plans[row], self.device, self.steps, trace)
        if trace is not None:
            found["kernels"] = read_kernels(trace)
            trace.unlink()
        return found

    def _found(self, row: Row, answer: Answer) -> dict[str, Any]:
        plan = self.plans[row]
        found = {**(planned(plan) if row.who == OURS else {}), "took_s": round(answer.took_s, 1)}
        if answer.value is None:
            return {**found, "problem": answer.problem}
        found |= answer.value
        gpu, flops = plan.cluster.gpu, flops_per_token(plan.model, row.case.seq_len)
        if gpu is not None and found.get("mfu") is None:
            found["mfu"] = found["tok_s"] * flops / gpu.peak_flops["bf16"]
        work = self.works.get((row.family, row.world))
        if work is not None and self.seconds:
            limit = limit_s(work, row.case, row.world, self.seconds)
            found["limit_tok_s"] = row.case.tokens / limit if limit else None
        return found

    def _plan_all(self, rows: Sequence[Row]) -> dict[Row, Plan | str]:
        found: dict[Row, Plan | str] = {}
        for row in rows:
            try:
                found[row] = plan_row(row, self.cluster(row.world), tiny=self.tiny)
            except UserError as error:
                found[row] = f"{error.what}: {error.why}"
        return found

    def _see(self, row: Row) -> SeenWork:
        experts = self.plans[row].model.experts_per_token
        return see_work(config_of(row, tiny=self.tiny), experts)

    def _call(self, name: str, work: Callable[[], Any], needs: float = 0.0) -> Call:
        return Call(work, self.logs / f"{_file_name(name)}.log", needs)


def _measure_ours(plan: Plan, device: str, steps: int, trace: Path | None) -> dict[str, Any]:
    """With one thread that compiles: results are on disk, or other rows compile beside it."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    return measure_row(plan, device, steps, trace)


def _file_name(name: object) -> str:
    return str(name).replace("/", "_")
