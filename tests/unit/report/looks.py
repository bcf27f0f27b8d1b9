"""What to ask a page about its looks, and where its pictures are kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from browser import Page

# Text that lies over other text of the same plot.
OVERLAPS = """[...document.querySelectorAll("svg")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")].map((it) => [it, it.getBoundingClientRect()]);
  return texts.flatMap(([one, a], place) => texts.slice(place + 1)
    .filter(([other, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom - 2
      && b.top < a.bottom - 2)
    .map(([other]) => `${svg.id}: ${one.textContent} / ${other.textContent}`));
})"""
SMALLEST = """Math.min(...[...document.querySelectorAll("figure.plot svg")].map(
  (svg) => 11.5 * svg.getScreenCTM().a))"""
WIDER = """[...document.querySelectorAll("body *")].filter((element) =>
  !element.closest(".scroll, pre, svg") && element.getBoundingClientRect().right > innerWidth + 1)
  .map((element) => element.outerHTML.slice(0, 80))"""

# Tables that are wider than their place: their last columns are out of sight.
CUT = """[...document.querySelectorAll(".scroll")].filter(
  (box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.closest("section").id)"""


def keep(page: Page, name: str, tmp_path: Path) -> None:
    page.screenshot(tmp_path / name)
    assert (tmp_path / name).stat().st_size > 20_000
    if place := os.environ.get("SHARDWISE_SCREENSHOTS"):
        Path(place).mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / name, Path(place) / name)


def look_everywhere(
    page: Page, name: str, tmp_path: Path, *, finds_nothing: tuple[str, ...]
) -> None:
    """By day, by night and on a phone: these scripts find nothing, and text can be read."""
    for width, scheme, place in (
        (1280, "light", "light"),
        (1280, "dark", "dark"),
        (375, "light", "phone"),
    ):
        page.look(width, scheme=scheme)
        for script in finds_nothing:
            assert page.ask(script) == [], place
        assert page.ask(SMALLEST) >= 10, place
        keep(page, f"{name}-{place}.png", tmp_path)
