"""What the pages promise about the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.errors import ExitCode
from shardwise.facts.presets import PRESETS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Where the two ends of a link within the documentation meet.
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_file_of_results_is_cited_and_every_cited_one_is_there() -> None:
    files = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    cited = {name for page in PAGES for name in re.findall(r"\bh200_\w+\.json", _text(page))}
    assert files == cited


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(_text(page)):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.+)$", _text(file), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{target}#{anchor}"


def test_the_log_has_a_row_and_at_most_ten_lines_for_every_experiment() -> None:
    table, *entries = re.split(r"^## ", _text(ROOT / "docs" / "LOG.md"), flags=re.MULTILINE)
    rows = re.findall(r"^\| (\d\d-\d\d) \| (.+?) \|", table, flags=re.MULTILINE)
    heads = []
    for entry in entries:
        head, *lines = entry.strip().splitlines()
        heads.append(tuple(head.split(" · ", 1)))
        assert len(lines) <= 10, head
        assert all(len(line) <= 140 for line in lines), head
    assert heads == rows


def test_the_quickstart_names_every_preset_and_no_other() -> None:
    (line,) = re.findall(
        r"^The presets: (.+)\. The plan of each", _text(ROOT / "docs/quickstart.md"), re.M
    )
    named: list[str] = []
    for group in line.split(";"):
        first, *others = re.findall(r"`([^`]+)`", group)
        # A name that begins with a dash differs from the group's first in its size.
        stems = [first[: -len(tail)] for tail in re.findall(r"-[^-]+$", first)]
        named += [first, *(f"{stems[0]}{name}" if name[0] == "-" else name for name in others)]
    assert sorted(named) == sorted(PRESETS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_cpu(page: Path) -> None:
    assert not re.search(r"\bprocessors?\b", _text(page), flags=re.IGNORECASE)


def test_one_page_has_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| (?:`(\w+)`)? ?\|", _text(ROOT / "docs/exit-codes.md"), re.M)
    named = {name: int(code) for code, name in rows if name}
    assert named == {code.name: int(code) for code in ExitCode}
    assert {code for code, name in rows if not name} == {"1", "130"}
    for page in PAGES:
        assert "| exit code | meaning |" not in _text(page), f"{page.name} has a table of its own"
