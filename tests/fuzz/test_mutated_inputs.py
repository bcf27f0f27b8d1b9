"""Mutated inputs of every kind through the real command line: an error with a fix, or a run.

Each case is a function of a seed and its number (cases.py), so that a failure can be made again:

    HF_HUB_OFFLINE=1 python tests/fuzz/zygote.py SEED NUMBER 1 results.jsonl FOLDER_FOR_INPUTS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ZYGOTE = Path(__file__).with_name("zygote.py")
SEED = 23
# A few cases a second on a busy machine.
PATIENCE_S = 7200
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def run_cases(tmp_path: Path, first: int, count: int, *kinds: str) -> list[dict[str, Any]]:
    results, inputs = tmp_path / "results.jsonl", tmp_path / "inputs"
    inputs.mkdir()
    environment = {key: val for key, val in os.environ.items() if key not in LAUNCHER_VARIABLES}
    environment |= {
        **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
        **{"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    }
    done = subprocess.run(
        [
            sys.executable,
            str(ZYGOTE),
            *map(str, (SEED, first, count, results, inputs)),
            *([",".join(kinds)] if kinds else []),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in results.read_text().splitlines()]


def assert_handled(cases: list[dict[str, Any]], inputs: Path) -> None:
    outcomes = Counter(
        (case["kind"], case["fault"] or ("ok" if case["code"] == 0 else "refused"))
        for case in cases
    )
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"{kind:16} {outcome:12} {count}")
    faults = [case for case in cases if case["fault"]]
    shown = "\n".join(json.dumps(case, indent=1) for case in faults[:3])
    assert not faults, f"{len(faults)} of {len(cases)}; inputs in {inputs}\n{shown}"


def test_a_sample_of_mutated_inputs_ends_with_a_fix_or_a_run(tmp_path: Path) -> None:
    cases = run_cases(tmp_path, 0, 18)
    assert len({case["kind"] for case in cases}) == 18
    assert_handled(cases, tmp_path / "inputs")


@pytest.mark.long
def test_five_thousand_mutated_inputs_end_with_a_fix_or_a_run(tmp_path: Path) -> None:
    assert_handled(run_cases(tmp_path, 30, 5000), tmp_path / "inputs")


@pytest.mark.long
def test_three_thousand_mutated_files_of_other_tools_are_migrated_or_refused(
    tmp_path: Path,
) -> None:
    assert_handled(run_cases(tmp_path, 0, 3000, "foreign"), tmp_path / "inputs")


@pytest.mark.long
def test_two_thousand_mutated_records_are_read_or_refused_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    cases = run_cases(tmp_path, 0, 2000, "events", "plan", "manifest")
    assert_handled(cases, tmp_path / "inputs")


@pytest.mark.long
def test_three_thousand_mutated_launches_are_refused_or_write_what_platforms_accept(
    tmp_path: Path,
) -> None:
    cases = run_cases(tmp_path, 0, 3000, "launch", "job files")
    assert_handled(cases, tmp_path / "inputs")
