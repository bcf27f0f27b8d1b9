"""HTML that is safe from injection: everything that is not markup already is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

_VOID = {"meta", "br", "input", "link"}


class Html(str):
    """Text that is markup. Only this module and its callers' own literals make it."""

    __slots__ = ()


def escape(value: object) -> Html:
    """Any value as text of a page; markup stays as it is."""
    if isinstance(value, Html):
        return value
    # Control characters are errors in HTML, and names and messages come from files.
    text = str(value)
    if not text.isprintable():
        text = "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)
    return Html(html.escape(text))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """`tag("td", 3, class_="n")` is `<td class="n">3</td>`; an attribute of None is left out."""
    spelled = "".join(
        f' {key.strip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{spelled}>")
    return Html(f"<{name}{spelled}>{join(children)}</{name}>")


def join(parts: Iterable[object]) -> Html:
    """Parts one after the other."""
    return Html("".join(escape(part) for part in parts))


def table(
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    name: str | None = None,
    numbers: Iterable[int] = (),
    stacked: bool = False,
) -> Html:
    """A table that scrolls inside itself; columns in `numbers` are aligned to the right.

    `stacked` puts the last column under the others where the screen is narrow, each cell after
    its column's name, for there is no head then.
    """
    right = set(numbers)
    styles = ["n" if place in right else None for place in range(len(head))]

    def cells(row: Sequence[object]) -> Iterator[Html]:
        for place, cell in enumerate(row):
            label = head[place] if stacked else None
            yield tag("td", cell, class_=styles[place] if head else None, data_label=label)

    body = tag("tbody", *(tag("tr", *cells(row)) for row in rows))
    titles = [tag("th", title, class_=style) for title, style in zip(head, styles, strict=True)]
    header = tag("thead", tag("tr", *titles)) if any(head) else ""
    whole = tag("table", header, body, id=name, class_="stacked" if stacked else None)
    return tag("div", whole, class_="scroll")
