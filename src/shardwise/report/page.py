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

    styles: tuple[str, ...] = ("report/page.css",)
    scripts: tuple[str, ...] = ("report/page.js",)
    is_served: bool = False
    """Whether a server of ours sends it, which its script may ask for more."""

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

    every_s: float | None = None
    """Its script asks for news after so many seconds."""


def render_page(kind: PageKind, page: WebPage, now: float | None = None) -> str:
    """The whole file."""
    style, script = _assets(kind.styles), _assets(kind.scripts)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy_of(kind)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=kind.generator),
        tag("meta", name="color-scheme", content="light dark"),
        # Without it a browser asks the server for an icon.
        tag("link", rel="icon", href="data:,") if kind.is_served else "",
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
        data_every=page.every_s,
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
    folder = files("shardwise")
    return Html("".join((folder / name).read_text(encoding="utf-8") for name in names))


def policy_of(kind: PageKind) -> str:
    """The content security policy: nothing is loaded, and no script runs but ours."""
    script = _assets(kind.scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    served = "connect-src 'self'; img-src data:; " if kind.is_served else ""
    return (
        f"default-src 'none'; {served}style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
