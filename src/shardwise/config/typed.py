"""Whether data that was read back has the types of its dataclass.

JSON that people or disks have changed could become a dataclass of any values. A number where text
should be is found here, and not in the middle of the code that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints


def validate_types(value: Any, hint: Any, name: str) -> None:
    """Raise TypeError, with the field's name, where `value` is not what `hint` says."""
    if not _fits(value, hint, name):
        raise TypeError(f"{name} is {str(value)[:80]!r}, which is no {_words(hint)}")


def _fits(value: Any, hint: Any, name: str) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, member, name) for member in arguments)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in arguments)
    if is_dataclass(origin or hint):
        return _fits_dataclass(value, origin or hint, arguments, name)
    if origin in (list, tuple, frozenset):
        return isinstance(value, origin) and _fits_items(value, arguments, name)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(
            _fits(key, arguments[0], name) and _fits(inner, arguments[1], name)
            for key, inner in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is hint or (hint is None and value is None)


def _fits_items(value: Any, arguments: tuple[Any, ...], name: str) -> bool:
    """`tuple[float, float]` has a type for each item; all others have one for all."""
    if isinstance(value, tuple) and Ellipsis not in arguments:
        pairs = zip(value, arguments, strict=False)
        return len(value) == len(arguments) and all(_fits(*pair, name) for pair in pairs)
    return all(_fits(item, arguments[0], name) for item in value)


def _fits_dataclass(value: Any, cls: Any, arguments: tuple[Any, ...], name: str) -> bool:
    if not isinstance(value, cls):
        return False
    parameters = dict(zip(getattr(cls, "__parameters__", ()), arguments, strict=False))
    for item in fields(cls):
        hint = parameters.get(_hints(cls)[item.name], _hints(cls)[item.name])
        validate_types(getattr(value, item.name), hint, f"{name}.{item.name}".lstrip("."))
    return True


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _words(hint: Any) -> str:
    return "null" if hint is NoneType else getattr(hint, "__name__", str(hint))
