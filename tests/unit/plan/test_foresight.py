"""`benchmarks/foresight.py` through the command line, on files that are partly nonsense."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FORESIGHT = BENCHMARKS / "foresight.py"
LLAMA_8B = {
    "source": "somebody's blog",
    "source_date": "2025-01",
    "model_family": "llama3",
    "model_size_label": "8b",
    "n_params": "8030261248",
    "n_layers": "32",
    "d_model": "4096",
    "n_heads": "32",
    "n_kv_heads": "8",
    "d_ff": "14336",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "H100",
    "gpu_mem_gb": "80",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "strategy": "FULL_SHARD",
    "dp_shard": "8",
    "micro_batch": "2",
    "precision": "bf16",
    "activation_ckpt": "none",
    "compile": "yes",
    "attention_impl": "flash_attention_3",
    "tokens_per_s_per_gpu": "9000",
    "method": "pretrain",
}
COLUMNS = [*LLAMA_8B, "tp", "pp", "mfu_pct", "notes", "interconnect"]


def run(folder: Path, rows: list[dict[str, str]], *options: str) -> str:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return foresee("--rows", str(path), *options)


def foresee(*options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(FORESIGHT), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_says_what_it_skips_and_goes_on(tmp_path: Path) -> None:
    rows = [
        LLAMA_8B,
        {**LLAMA_8B, "gpu": "TPUv5"},
        {**LLAMA_8B, "seq_len": "long"},
        {**LLAMA_8B, "tokens_per_s_per_gpu": ""},
        {**LLAMA_8B, "precision": "fp8", "gpu": "A100"},
        {**LLAMA_8B, "n_params": "100e9"},
        {**LLAMA_8B, "method": "dpo"},
        {"source": "torn"},
    ]
    text = run(tmp_path, rows)
    assert "1 rows used, 7 skipped" in text
    for reason in (
        "GPU 'TPUv5' is not in the catalogue (line 3;",
        "seq_len is 'long' (line 4;",
        "neither tokens per second nor a share of the peak is stated (line 5;",
        "A100-80GB has no fp8 (line 6;",
        "its sizes explain 8% of its parameters",
        "dpo is not plain training (line 8;",
        "gpu is not stated (line 9; torn)",
    ):
        assert reason in text
    assert "calibrated stacks: no rows" in text
    assert "somebody's" in text


def test_lines_with_too_many_or_too_few_fields_are_rows_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    values = list(LLAMA_8B.values())
    lines = [list(LLAMA_8B), [*values, "more", "and more"], values[:5], values]
    path.write_text("\n".join(",".join(line) for line in lines) + "\n")
    assert "2 rows used, 1 skipped" in foresee("--rows", str(path))


def test_a_calibrated_stack_is_held_to_its_own_bar(tmp_path: Path) -> None:
    torchtitan = {**LLAMA_8B, "source": "torchtitan somewhere", "gpu_mem_gb": "96"}
    rows = [
        {**torchtitan, "activation_ckpt": "selective", "tokens_per_s_per_gpu": "6667"},
        {**torchtitan, "tokens_per_s_per_gpu": "70", "notes": "wrong by a hundred"},
    ]
    text = run(tmp_path, rows, "--worst", "1")
    assert "FAIL  calibrated stacks: 2 rows" in text
    assert "FAIL  stacks never seen: 2 rows" in text
    worst = text.split("worst rows")[1]
    assert "70 published" in worst
    assert "6,667 published" not in worst


def test_a_run_that_no_single_term_explains_is_shown_too(tmp_path: Path) -> None:
    # Ten times as fast as predicted: no term takes nine tenths of a step.
    small = {"n_gpus": "1", "dp_shard": "1", "seq_len": "512", "micro_batch": "1", "compile": "no"}
    text = run(tmp_path, [{**LLAMA_8B, **small, "tokens_per_s_per_gpu": "20000"}])
    assert "no term alone" in text
    assert "20,000 published" in text


def test_a_run_faster_than_the_peak_of_its_card_was_on_another_one(tmp_path: Path) -> None:
    # 20,000 tokens a second need 106% of an H100's peak, or 138% with recompute; LoRA 72%.
    fast = {**LLAMA_8B, "tokens_per_s_per_gpu": "20000"}
    rows = [fast, {**fast, "activation_ckpt": "full"}, {**fast, "method": "lora"}]
    text = run(tmp_path, rows)
    assert "1 rows used, 2 skipped" in text
    assert "it computes at 104% of the peak of H100: another card? (line 2;" in text
    assert "it computes at 137% of the peak of H100: another card? (line 3;" in text


def test_adapters_cost_time_and_in_fsdp1_their_gathers_do_not_overlap(tmp_path: Path) -> None:
    lora = {**LLAMA_8B, "method": "lora", "interconnect": "100 Gbps", "n_gpus": "16"}
    lora |= {"dp_shard": "16", "tokens_per_s_per_gpu": "5000"}
    texts = [
        run(tmp_path, [{**lora, "source_date": date}]).split(" foreseen")[0].rsplit(" ", 1)[1]
        for date in ("2024-03", "2025-01")
    ]
    in_turn, beside = (float(text.replace(",", "")) for text in texts)
    assert in_turn < 0.9 * beside


def test_the_published_runs_give_the_errors_that_the_pages_state() -> None:
    text = foresee()
    assert "PASS  calibrated stacks: 152 rows, median 3.1% (bar 6%), 90th percentile 10.8%" in text
    assert "PASS  stacks never seen: 241 rows, median 6.9% (bar 12%), 90th percentile 24.3%" in text
    assert "stacks without a profile: 31 rows, median 4.0% (bar 8%), 90th percentile 18.1%" in text
    assert (
        "context or expert parallel, calibrated stacks: 58 rows, median 5.9% (bar 8%), 90th "
        in text
    )
    assert "PASS  LoRA and QLoRA, stacks never seen: 33 rows, median 4.5% (bar 10%)" in text
    assert "  28 of 31 within 15%:   31 rows  median   6.9%  p90  14.7%" in text
    of_405b = [line for line in text.splitlines() if " waits " in line and "llama3 405b" in line]
    assert len(of_405b) == 7
    assert all(abs(float(line.split("%")[0])) <= 15 for line in of_405b)
    readme = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    assert "152 published runs" in readme and "3.1%" in readme and "10.8%" in readme
    assert "58 published runs" in readme and "5.9%" in readme and "17.4%" in readme
    assert "28 of 31 within 15%, those of 405B 7 of 7; median 6.9%" in readme
    assert "241 published runs" in readme and "6.9%" in readme and "24.3%" in readme


def test_rows_that_no_fit_has_seen_give_the_errors_that_the_log_states() -> None:
    text = foresee("--rows", str(BENCHMARKS / "held_out_runs.csv"))
    assert "stacks without a profile: 18 rows, median 10.9% (bar 8%), 90th percentile 28.7%" in text
    assert "PASS  LoRA and QLoRA, stacks never seen: 15 rows, median 8.5% (bar 10%)" in text


def test_a_share_of_the_peak_stands_for_tokens(tmp_path: Path) -> None:
    # 6 x 8.03e9 + 12 x 32 x 4096 x 8192 FLOPs a token, of 989.4e12.
    flops = 6 * 8_030_261_248 + 12 * 32 * 4096 * 8192
    share = {**LLAMA_8B, "tokens_per_s_per_gpu": "", "mfu_pct": f"{9000 * flops / 989.4e10:.6f}"}
    text = run(tmp_path, [share])
    assert " foreseen, 9,000 published" in text


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, str(FORESIGHT), "--rows", str(tmp_path / "none.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot read" in done.stderr


def test_the_shipped_profiles_foresee_a_published_run(tmp_path: Path) -> None:
    # MosaicML's 7B on eight A100s; the notes select nothing.
    row = {
        **LLAMA_8B,
        "source": "llm-foundry scripts/train/benchmarking/README.md",
        "source_date": "2023-05..2024-01",
        "n_params": "6667247616",
        "n_kv_heads": "32",
        "d_ff": "16384",
        "vocab": "50368",
        "seq_len": "4096",
        "gpu": "A100",
        "micro_batch": "16",
        "activation_ckpt": "full",
        "compile": "no",
        "attention_impl": "flash",
        "tokens_per_s_per_gpu": "3684",
    }
    assert "PASS  calibrated stacks: 1 rows" in run(tmp_path, [row])


def test_the_documentation_shows_the_tables_of_quoted_figures() -> None:
    command = [sys.executable, str(BENCHMARKS / "quoted_figures.py"), "--markdown"]
    tables = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert tables.strip() in (BENCHMARKS.parent / "docs/foresight.md").read_text(encoding="utf-8")
