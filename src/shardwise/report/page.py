"""A page: one file with everything in it, which loads nothing and talks to nobody."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from shardwise.report.markup import Html, tag
from shardwise.report.values import clock
from shardwise.version import __version__


@dataclass(frozen=True, slots=True)
class PageKind:
    """One of the pages that commands write."""

    generator: str
    """The command, which the page names as its own."""

    noun: str
    option: str
    """What names the file."""

    styles: tuple[str, ...] = ("page.css",)
    scripts: tuple[str, ...] = ("page.js",)

    def wrote(self, start: bytes) -> bool:
        """Whether a file with this beginning is such a page."""
        return f'<meta name="generator" content="{self.generator}"'.encode() in start


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPage:
    """What stands on it."""

    title: str
    header: Iterable[Html]
    sections: Iterable[Html]
    data: dict[str, Any] | None = None
    """What the script reads."""

    reload_s: float | None = None
    """It reloads itself after so many seconds."""


def render_page(kind: PageKind, page: WebPage, now: float | None = None) -> str:
    """The whole file."""
    style, script = _assets(kind.styles), _assets(kind.scripts)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=kind.generator),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{page.title}: {kind.generator}"),
        tag("style", style),
    )
    written = clock(time.time() if now is None else now)
    body = tag(
        "body",
        tag("header", *page.header),
        tag("main", *page.sections),
        tag("footer", f"shardwise {__version__}, written {written} UTC"),
        "" if page.data is None else _data(page.data),
        tag("script", script),
        data_reload=page.reload_s,
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def section(name: str, title: str, *content: object) -> Html:
    """One part of a page, under its heading."""
    return tag("section", tag("h2", title), *content, id=name)


def _data(data: dict[str, Any]) -> Html:
    """JSON that no browser runs, and that cannot close its element."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", id="data")


def _assets(names: tuple[str, ...]) -> Html:
    """Our own style or script. Neither contains what would close its element."""
    folder = files("shardwise.report")
    return Html("".join((folder / name).read_text(encoding="utf-8") for name in names))


def _policy(script: str) -> str:
    """The content security policy: nothing is loaded, and no script runs but ours."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
