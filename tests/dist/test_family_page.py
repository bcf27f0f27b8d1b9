"""docs/families.md says what is so. Where it does not, this writes it anew in ten minutes:

SHARDWISE_CHAOS=1 SHARDWISE_WRITE_FAMILIES=1 .venv/bin/pytest tests/dist/test_family_page.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from family_facts import PAGE, facts_of, table_of, write_table, written_table
from rank_pool import Ranks
from tiny_families import FAMILIES

pytestmark = pytest.mark.dist
Pool = Callable[[int], Ranks]

# A plain one, a window, a soft cap of logits, sinks and experts, a multiplier after the head, no
# attention, a loss of its own, and two that are refused.
SAMPLE = (
    *("llama", "mistral", "gemma2", "gpt_oss", "granite", "mamba", "prophetnet"),
    *("xlnet", "musicgen"),
)


@pytest.mark.parametrize("family", SAMPLE)
def test_a_row_says_what_is_found(family: str, ranks: Pool, tmp_path: Path) -> None:
    found = facts_of(ranks, family, tmp_path).row()
    assert found in written_table().splitlines(), f"docs/families.md is stale:\n{found}"


def test_every_family_has_a_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__} " not in page:
        pytest.skip("the page is of another release")
    assert tuple(re.findall(r"^\| `(\S+)` \|", written_table(), flags=re.MULTILINE)) == FAMILIES


@pytest.mark.long
def test_every_row_says_what_is_found(
    ranks: Pool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = []
    for family in FAMILIES:
        rows.append(facts_of(ranks, family, tmp_path_factory.mktemp(family)))
        print(rows[-1].row(), flush=True)
    if os.environ.get("SHARDWISE_WRITE_FAMILIES") == "1":
        write_table(rows)
    assert table_of(rows) == written_table()
