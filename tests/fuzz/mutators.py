"""Small, seeded changes of bytes and of trees: what a bad disk, a typing slip or an enemy makes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

# A number that no `json.dumps` writes: it is put into the text afterwards.
HUGE = "@@huge@@"
DEEP = "@@deep@@"
_SPELLED = {f'"{HUGE}"': "9" * 5000, f'"{DEEP}"': "[" * 5000 + "]" * 5000}

NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 7, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), HUGE, DEEP),
    *("", " ", "x", "0", "-1", "1e5", "auto", "null", "true", "nan", "\0", "a\0b", "\ud800"),
    *("é" * 200, "x" * 300, "x" * 5000, "a/" * 3000, "..", "../..", "/", "/proc/self", "/dev/null"),
    *("~", "~nobody/x", "*", "[", "{c.name}", "%s", "a=b", "-x", "\x1b[2J", "\u202e", "org/name"),
    *([], [[]], {}, {"": {}}, {"a": {"b": [None]}}, [1] * 300, ["x", 1, None], {"x": "y"}),
)
TOKENS: tuple[bytes, ...] = (
    *(
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"\r\n",
        b"\t",
        b"\x1b[2J",
        b"\\",
        b'"',
        b"'",
    ),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b": ",
        b",",
        b"- ",
        b"? ",
        b"#",
        b"&a ",
        b"*a",
        b"<<: *a",
        b"|",
    ),
    *(b"---\n", b"...\n", b"%YAML 9.9\n", b"!!python/object/apply:os.system [true]", b"!x "),
    *(b'"\\U99999999"', b'"\\ud800"', b"9" * 5000, b"0x" + b"f" * 5000, b"1e999", b"NaN", b"-"),
    *(b"[" * 5000, b"{a: " * 3000, b"x" * 5000, b"\n" * 100, b"null", b"true", b"0", b"-1"),
)

Tree = Any
Rng = random.Random


def mutate_bytes(rng: Rng, data: bytes) -> bytes:
    """One to three changes at random places."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(_BYTE_CHANGES)(rng, data)
    return data


def mutate_tree(rng: Rng, tree: Tree) -> Tree:
    """One to three changes of a tree of mappings and lists."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = _change_tree(rng, tree)
    return tree


def mutate_json(rng: Rng, data: bytes) -> bytes:
    """A change of the text, or of what it says."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):  # changed before
        return mutate_bytes(rng, data)
    return spell_json(mutate_tree(rng, tree))


def mutate_lines(rng: Rng, data: bytes) -> bytes:
    """Lines of JSON: one of them changed, or lines moved, doubled, cut."""
    lines = data.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    how = rng.random()
    if how < 0.6:
        lines[index] = mutate_json(rng, lines[index].rstrip(b"\n")) + b"\n"
    elif how < 0.7:
        lines[index] = spell_json(rng.choice(NASTY)) + b"\n"
    elif how < 0.8:
        rng.shuffle(lines)
    else:
        return mutate_bytes(rng, data)
    return b"".join(lines)


def spell_json(tree: Tree) -> bytes:
    text = json.dumps(tree)
    for mark, spelled in _SPELLED.items():
        text = text.replace(mark, spelled)
    return text.encode()


# ---- bytes -------------------------------------------------------------------------------------


def _place(rng: Rng, data: bytes) -> int:
    # Headers and ends are where formats break.
    return rng.choice((0, rng.randint(0, min(64, len(data))), rng.randint(0, len(data)), len(data)))


def _flip(rng: Rng, data: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    index = min(_place(rng, data), len(changed) - 1)
    changed[index] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _insert(rng: Rng, data: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _cut_out(rng: Rng, data: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + data[at + rng.choice((1, 2, 8, 64, 1000)) :]


def _truncate(rng: Rng, data: bytes) -> bytes:
    return data[: _place(rng, data)]


def _double(rng: Rng, data: bytes) -> bytes:
    first, last = sorted((_place(rng, data), _place(rng, data)))
    return data[:last] + data[first:last] + data[last:]


def _replace_word(rng: Rng, data: bytes) -> bytes:
    words = data.split(b" ")
    words[rng.randrange(len(words))] = rng.choice(TOKENS)
    return b" ".join(words)


def _noise(rng: Rng, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 8, 100)))


_BYTE_CHANGES: tuple[Callable[[Rng, bytes], bytes], ...] = (
    *(_flip, _flip, _insert, _insert, _insert, _cut_out, _truncate, _double, _replace_word, _noise),
)


# ---- trees -------------------------------------------------------------------------------------


def _holders(tree: Tree) -> list[tuple[Any, Any]]:
    """(container, key) of every value below the root."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                waiting.append(node[key])
    return found


def _change_tree(rng: Rng, tree: Tree) -> Tree:
    places = _holders(tree) if isinstance(tree, dict | list) else []
    if not places or rng.random() < 0.02:
        return copy.deepcopy(rng.choice(NASTY))
    holder, key = rng.choice(places)
    how = rng.random()
    if how < 0.65:
        holder[key] = copy.deepcopy(rng.choice(NASTY))
    elif how < 0.75:
        del holder[key]
    elif how < 0.85:
        other, name = rng.choice(places)
        holder[key] = copy.deepcopy(other[name])
    elif isinstance(holder, dict):
        holder[rng.choice(("x", "", key + "x", "a" * 3000, "__class__"))] = holder.pop(key)
    else:
        holder.insert(key, copy.deepcopy(rng.choice(NASTY)))
    return tree
