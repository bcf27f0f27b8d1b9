"""docs/doctor.md and the registry name the same checks, and no known row is without one."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.doctor.registry import CHECKS, GROUPS

PAGE = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
ROWS = {
    row: re.findall(r"`(SW\d+)`", ids)
    for row, ids in re.findall(r"^\| ([^|`]+) \| ((?:`SW\d+`(?:, )?)+) \|$", PAGE, re.MULTILINE)
}
# By a word or two that each row must have: failure modes, troubleshooting, limits, what to watch.
KNOWN_ROWS = (
    *("only the root", "1-D sharding across nodes", "NVLink domain", "reduced in bf16", "ACS"),
    *("NCCL_IB_HCA", "GDRDMA", "FSDP1 and FSDP2", "no overlap", "MFU", "full state dict"),
    *("while the model is loaded", "do not update", "do not overlap", "from_pretrained"),
    *("CPU offload takes", "loss scale collapsed", "on some ranks", "more than ten minutes"),
    *("tensor parallelism", "init_process_group", "zero in some steps", "512 ranks"),
    *("world size", "too small or too large", "one gathered unit", "16 bytes", "communicators"),
    *("use_orig_params", "pipeline stages", "before Ampere", "within 5%", "drifts"),
    *("NVLink island", "ten times", "peak memory", "over PCIe", "suddenly takes longer"),
    *("against its baseline", "flat parameters", "bandwidth limits", "datacenters"),
    *("not healthy before the start", "leave the fast links"),
)


def test_every_known_row_has_its_checks() -> None:
    for words in KNOWN_ROWS:
        (row,) = [row for row in ROWS if words in row]
        assert ROWS[row], row
    assert len(ROWS) == len(KNOWN_ROWS)


def test_rows_name_checks_that_exist() -> None:
    assert {name for ids in ROWS.values() for name in ids} <= set(CHECKS)


def test_the_page_lists_all_checks_and_no_other() -> None:
    listed = re.findall(r"^\| (SW\d+) \| (\w+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert listed == [
        (check.id, check.level, check.title) for group in GROUPS.values() for check in group
    ]
    assert sum(len(group) for group in GROUPS.values()) == len(CHECKS)


def test_texts_are_sentences() -> None:
    for check in CHECKS.values():
        assert re.fullmatch(r"SW\d{3}", check.id)
        assert not check.title.endswith("."), check.id
        assert check.why.endswith("."), check.id
        assert check.fix and not check.fix.endswith("."), check.id
