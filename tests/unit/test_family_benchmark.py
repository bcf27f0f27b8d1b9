"""`benchmarks/families.py` without a GPU: its families, limits, processes and tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from family_forks import Call, run_calls
from family_limits import COPY, Kernel, kernels_of, limit_s
from family_list import FAMILIES, PLACES, SETTINGS, Case
from family_profile import class_of, summed
from family_rows import Row, config_of, plan_row, planned, shortest, shortest_bytes
from family_run import Board
from family_table import in_band, markdown, memory_error, speed_error, summary
from family_work import SeenAttention, SeenExperts, SeenWork, see_work
from shardwise.errors import UserError
from shardwise.facts.cluster import parse_cluster
from shardwise.units import GIB

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASE = Case.parse("2-none@4096")


def kinds_of(hf_config: dict[str, Any]) -> Counter[Any]:
    """Blocks of a model by their layers, their parameters and their attention."""
    from transformers import CONFIG_MAPPING

    from shardwise.model.blocks import find_units, iter_modules
    from shardwise.model.build import build_on_meta

    model = build_on_meta(hf_config, attention=None)
    config = CONFIG_MAPPING[hf_config["model_type"]].from_dict(dict(hf_config))
    types = getattr(config, "layer_types", None) or [""] * hf_config["num_hidden_layers"]
    ropes = getattr(config, "no_rope_layers", None) or [1] * hf_config["num_hidden_layers"]
    blocks = [b for unit in find_units(model).blocks for b in iter_modules(model, unit)]
    shapes = [tuple(p.shape for p in block.parameters()) for block in blocks]
    return Counter(zip(shapes, types, ropes, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tiny_family_has_every_kind_of_layer(name: str) -> None:
    family = FAMILIES[name]
    deep = kinds_of(family.tiny(2 * max(family.layers.values())))
    assert kinds_of(family.tiny()).keys() == deep.keys()


def test_there_are_enough_families_and_settings() -> None:
    assert len(FAMILIES) >= 18 and sum(not family.seen for family in FAMILIES.values()) >= 4
    cases = [Case.parse(text) for text in SETTINGS]
    assert [str(case) for case in cases] == list(SETTINGS)
    assert {case.setting.recompute for case in cases} == {"none", "selective", "full"}
    assert {case.seq_len for case in cases} == {4096, 8192}
    for seq_len in (4096, 8192):
        assert len({c.setting.micro_batch for c in cases if c.seq_len == seq_len}) >= 2


@pytest.mark.parametrize("world", PLACES)
def test_a_row_is_planned_and_its_shortest_model_is_small(world: int) -> None:
    row = Row("llama-3.1-8b", world, CASE)
    plan = plan_row(row, parse_cluster(f"{world}xH200"), tiny=False)
    assert plan.model.num_layers == FAMILIES["llama-3.1-8b"].layers[world]
    assert plan.tokens_per_step == world * CASE.tokens
    found = planned(plan)
    assert found["plan_gib"] == plan.memory.reserved / GIB
    assert found["plan_low_gib"] < found["plan_gib"] < found["plan_high_gib"]
    assert found["plan_total_gib"] > found["plan_gib"]
    assert sum(found["plan_terms_ms"].values()) == pytest.approx(
        1e3 * plan.forecast.step_s, rel=1e-2
    )
    assert shortest(plan, 1).hf_config["num_hidden_layers"] == 1
    assert shortest(plan, 1).decided == plan.decided
    assert 0.1 * plan.memory.total < shortest_bytes(plan, 1) < 0.8 * plan.memory.total


def test_work_is_seen_in_the_models_own_code() -> None:
    row = Row("llama-3.1-8b", 8, CASE)
    work = see_work(config_of(row, tiny=True), 1)
    assert work.linears == {
        ((64, 64), (64, 32), (64, 32)): 2,
        ((64, 64),): 2,
        ((64, 128), (64, 128)): 2,
        ((128, 64),): 2,
        ((64, 512),): 1,
    }
    assert work.attentions == {SeenAttention(4, 16, 16, None): 2}
    local = see_work(FAMILIES["gemma-3-12b"].tiny(), 1).attentions
    assert local == {SeenAttention(4, 16, 16, 32): 5, SeenAttention(4, 16, 16, None): 1}
    experts = see_work(FAMILIES["qwen3-30b-a3b"].tiny(), 2).experts
    assert experts == {SeenExperts(4, 2, (64, 64)): 2, SeenExperts(4, 2, (64, 32)): 2}


def test_the_limit_adds_matmuls_experts_attention_and_update() -> None:
    whole, experts = SeenAttention(4, 64, 64, None), SeenExperts(8, 2, (64, 32))
    local = SeenAttention(4, 64, 64, 1024)
    work = SeenWork(
        {((8, 8), (8, 4)): 2.0, ((8, 100),): 1.0}, {experts: 3}, {whole: 1, local: 1}, 10**9
    )
    names = {str(kernel) for kernel in kernels_of(work, 4096)}
    assert names == {
        *("layer 8 x 8", "layer 8 x 4", "layer 8 x 12", "layer 8 x 100"),
        *("experts 8 x 64 x 32, 2 a token", "attention 4 x 64/64 over 4096"),
    }
    seconds = {str(Kernel((8, 8))): 3e-6, "layer 8 x 4": 2e-6, "layer 8 x 12": 4e-6}
    seconds |= {"layer 8 x 100": 1e-6, "experts 8 x 64 x 32, 2 a token": 2e-6}
    seconds |= {"attention 4 x 64/64 over 4096": 8e-6, COPY: 4e12}
    seen = (1024 - 1024**2 / 8192) / 2048
    per_token = 2 * 4e-6 + 1e-6 + 3 * 2e-6 + 8e-6 * (1 + seen)
    update = 32 * 10**9 / 8 / 4e12
    assert limit_s(work, CASE, 8, seconds) == pytest.approx(8192 * per_token + update)
    del seconds["layer 8 x 12"]
    assert limit_s(work, CASE, 8, seconds) is None


def test_calls_end_each_in_their_own_way(tmp_path: Path) -> None:
    def refuse() -> None:
        raise UserError("no", why="it is so")

    def fail() -> None:
        raise RuntimeError("CUDA out of memory")

    works = [lambda: 7, refuse, fail, lambda: time.sleep(60), lambda: os._exit(3)]
    calls = [Call(work, tmp_path / f"{n}.log") for n, work in enumerate(works)]
    found = dict(run_calls(calls, at_once=5, limit_s=3))
    assert found[0].value == 7 and found[0].problem == ""
    problems = [found[n].problem for n in range(1, 5)]
    assert problems == ["no: it is so", "out of memory", "the time was up", "exit code 3"]
    late = dict(run_calls(calls[:2], ends=0.0))
    assert {answer.problem for answer in late.values()} == {"not run: the time was up"}


def test_calls_share_the_room(tmp_path: Path) -> None:
    def span() -> tuple[float, float]:
        began = time.monotonic()
        time.sleep(0.3)
        return began, time.monotonic()

    calls = [Call(span, tmp_path / f"{n}.log", needs=0.6) for n in range(2)]
    spans = sorted(answer.value for _, answer in run_calls(calls, at_once=2, room=1.0))
    assert spans[0][1] <= spans[1][0], "both at once need more than there is"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention forward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention backward"),
        ("triton_tem_fused_flex_attention_backward_3", "attention backward"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "matmul"),
        ("cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape", "grouped matmul"),
        ("triton_red_fused_mul_pow_2", "elementwise"),
        ("_adamw_kernel", "optimizer"),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", "copies"),
        ("something_new", "other"),
    ],
)  # fmt: skip
def test_kernels_have_classes(name: str, kind: str) -> None:
    assert class_of(name) == kind
    assert class_of(name, "gpu_memset") == "memset"


def test_kernels_are_summed_over_streams() -> None:
    events = [
        {"cat": "kernel", "name": "nvjet_a", "ts": 0.0, "dur": 3000.0},
        {"cat": "kernel", "name": "nvjet_a", "ts": 9000.0, "dur": 1000.0},
        # On another stream, beside the first, and for 500 us after it.
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 2500.0, "dur": 1000.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9000.0},
    ]
    found = summed(events, steps=2)
    assert found == {
        "idle_ms": 2.75,
        "classes_ms": {"matmul": 2.0, "copies": 0.5},
        "top_ms": {"nvjet_a": 2.0, "Memcpy DtoD": 0.5},
    }


def a_row(**changes: Any) -> dict[str, Any]:
    plan = {"plan_gib": 40.0, "plan_low_gib": 39.0, "plan_high_gib": 42.0, "plan_tok_s": 10_000.0}
    found = {"reserved_gib": 41.0, "allocated_gib": 38.0, "tok_s": 9_000.0, "mfu": 0.5}
    row = {**Row("llama-3.1-8b", 8, CASE).names, **plan, "plan_terms_ms": {"matmul": 5.0}}
    return {**row, **found, "limit_tok_s": 10_000.0, **changes}


def test_rows_become_a_table_and_a_summary() -> None:
    good, low = a_row(), a_row(reserved_gib=50.0, seen=False, world=1, kernels=summed([], 1))
    assert memory_error(good) == pytest.approx(40 / 41 - 1) and in_band(good) is True
    assert memory_error(low) == pytest.approx(-0.2) and in_band(low) is False
    assert speed_error(good) == pytest.approx(1 / 9)
    lost = {**Row("llama-3.1-8b", 8, Case.parse("4-full@4096")).names, "problem": "out | of"}
    peer = {**Row("llama-3.1-8b", 8, CASE, "compile").names, "tok_s": 6_000.0, "reserved_gib": 60.0}
    lines = summary([good, low, lost]).splitlines()
    assert lines[0] == (
        "all: 2 rows; memory within 5%: 50%, too low by 20.0% at worst, too high by 0.0%, "
        "likely: 50%; speed off by 11.1% (median), 11.1% (worst)"
    )
    assert lines[-1] == "1 of 3 rows have no measurement"
    text = markdown({"machine": {"gpu": "H200"}, "rows": [good, low, lost, peer]})
    assert "| 40.0 | 39.0 to 42.0 | 41.0 | -2.4% | yes | 38.0 |" in text
    assert "| 10,000 | 9,000 | +11.1% | 50.0% | 90.0% |" in text
    assert "out / of |" in text
    assert "| compile | 6,000 | - | - | 60.0 | 9,000 | 1.50 |" in text
    assert "ms of a step by the plan: matmul 5.0" in text
    for table in (part for part in text.split("\n\n") if part.startswith("|")):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_what_a_file_holds_is_not_run_again(tmp_path: Path) -> None:
    file, row = tmp_path / "rows.json", Row("qwen3-8b", 8, CASE)
    board = Board.open(file, {})
    board.put(row, {"problem": "out of memory"})
    assert not Board.open(file, {}).holds(row), "it is tried once more"
    board.put(row, {"tok_s": 1.0})
    again = Board.open(file, {})
    assert again.holds(row) and len(again.results["rows"]) == 1


@pytest.mark.long
def test_tiny_families_go_from_plan_to_table(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--device", "cpu", "--steps", "1", "--warm", "2", "--profile"]
    options += ["--families", "qwen3-30b-a3b", "--settings", "2-selective@8192"]
    options += ["--rows", "qwen*/8/*", "--trainer", "liger"]
    options += ["--json", str(file), "--logs", str(tmp_path / "logs")]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "SHARDWISE_CACHE": str(tmp_path)}
    command = [sys.executable, str(BENCHMARKS / "families.py")]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["row"] for row in rows] == ["qwen3-30b-a3b/8/2-selective@128"]
    assert not rows[0].get("problem"), rows[0]["problem"]
    assert rows[0]["tok_s"] > 0 and rows[0]["limit_tok_s"] > 0 and rows[0]["kernels"]
    assert markdown(json.loads(file.read_text())) in done.stdout
    table = subprocess.run(
        [*command, "--table", str(file)], capture_output=True, text=True, check=True
    )
    assert table.stdout.strip() == markdown(json.loads(file.read_text())).strip()
