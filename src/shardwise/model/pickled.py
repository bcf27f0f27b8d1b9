"""Pickles as inert data: opcodes are read one by one, and nothing that they name is called.

An unpickler with a list of allowed names still runs what is on the list, with arguments that the
file chose. Here a class is its name, and an object is that name with its arguments and state.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Described:
    """An object as the pickle describes it: what would be called with what, and its state."""

    made_by: Name
    args: tuple[Any, ...]
    state: Any = None


# What a pickle refers to outside of itself is described by this name and its id.
OUTSIDE = Name("", "persistent id")
_ORDERED = Name("collections", "OrderedDict")


class Ordered(dict[Any, Any]):
    """The items of an OrderedDict. Attributes that it had are left out."""


class RefusedPickle(ValueError):
    """A pickle that is not plain data and the allowed names."""


def read_pickle(data: bytes, allowed: Container[Name]) -> Any:
    """What `data` describes: plain values, and a `Described` for each object of an allowed name."""
    tape = _Tape(allowed)
    try:
        for opcode, arg, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return tape.pop()
            step = _STEPS.get(opcode.name)
            if step is None:
                raise RefusedPickle(f"it has the opcode {opcode.name}, which plain data does not")
            step(tape, arg)
    except RefusedPickle:
        raise
    # genops raises ValueError for broken opcodes. The other errors mean that stacks or types are
    # out of order.
    except (ValueError, TypeError, LookupError, MemoryError) as error:
        raise RefusedPickle(f"it is not a whole pickle ({type(error).__name__})") from error
    raise RefusedPickle("it has no end")


@dataclass(slots=True)
class _Tape:
    """The stack and memory of a pickle that is being read."""

    allowed: Container[Name]
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def memoize(self, place: int | None) -> None:
        self.memo[len(self.memo) if place is None else place] = self.stack[-1]

    def pop_last(self, count: int) -> list[Any]:
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise RefusedPickle("it has a name that is not text")
        found = Name(module, name)
        if found not in self.allowed:
            raise RefusedPickle(f"it names {str(found)[:200]!r}")
        self.push(found)

    def describe(self) -> None:
        """Describe a call of the pickle: `stack` ends with a name and its arguments."""
        args, made_by = self.pop(), self.pop()
        if type(args) is not tuple or type(made_by) is not Name:
            raise RefusedPickle("it calls what is not a name")
        self.push(Ordered() if made_by == _ORDERED and not args else Described(made_by, args))

    def refer(self) -> None:
        if OUTSIDE not in self.allowed:
            raise RefusedPickle("it refers to what is not in it")
        self.push(Described(OUTSIDE, (self.pop(),)))

    def set_state(self) -> None:
        state, described = self.pop(), self.stack[-1]
        if type(described) is Ordered:
            return
        if type(described) is not Described:
            raise RefusedPickle("it gives a state to what is not an object")
        described.state = state

    def add_to_list(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise RefusedPickle("it appends to what is not a list")
        target.extend(items)

    def add_to_dict(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, Ordered) or len(items) % 2:
            raise RefusedPickle("it sets items of what is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Tuples are refused here: the hash of one that holds another twice, and so on, never
            # ends.
            if type(key) not in (str, int, Described):
                raise RefusedPickle(f"it has a dictionary key of type {type(key).__name__}")
            target[key] = value


_LITERALS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
)
_STEPS: dict[str, Callable[[_Tape, Any], None]] = {
    "PROTO": lambda tape, arg: None,
    "FRAME": lambda tape, arg: None,
    **dict.fromkeys(_LITERALS, lambda tape, arg: tape.push(arg)),
    "NONE": lambda tape, arg: tape.push(None),
    "NEWTRUE": lambda tape, arg: tape.push(True),
    "NEWFALSE": lambda tape, arg: tape.push(False),
    "EMPTY_DICT": lambda tape, arg: tape.push({}),
    "EMPTY_LIST": lambda tape, arg: tape.push([]),
    "EMPTY_TUPLE": lambda tape, arg: tape.push(()),
    "MARK": lambda tape, arg: tape.mark(),
    "TUPLE": lambda tape, arg: tape.push(tuple(tape.pop_to_mark())),
    "TUPLE1": lambda tape, arg: tape.push(tuple(tape.pop_last(1))),
    "TUPLE2": lambda tape, arg: tape.push(tuple(tape.pop_last(2))),
    "TUPLE3": lambda tape, arg: tape.push(tuple(tape.pop_last(3))),
    "MEMOIZE": lambda tape, arg: tape.memoize(None),
    "BINPUT": lambda tape, arg: tape.memoize(arg),
    "LONG_BINPUT": lambda tape, arg: tape.memoize(arg),
    "BINGET": lambda tape, arg: tape.push(tape.memo[arg]),
    "LONG_BINGET": lambda tape, arg: tape.push(tape.memo[arg]),
    "GLOBAL": lambda tape, arg: tape.name(*arg.split(" ", 1)),
    "STACK_GLOBAL": lambda tape, arg: tape.name(*tape.pop_last(2)),
    "REDUCE": lambda tape, arg: tape.describe(),
    "NEWOBJ": lambda tape, arg: tape.describe(),
    "BINPERSID": lambda tape, arg: tape.refer(),
    "BUILD": lambda tape, arg: tape.set_state(),
    "APPEND": lambda tape, arg: tape.add_to_list([tape.pop()]),
    "APPENDS": lambda tape, arg: tape.add_to_list(tape.pop_to_mark()),
    "SETITEM": lambda tape, arg: tape.add_to_dict(tape.pop_last(2)),
    "SETITEMS": lambda tape, arg: tape.add_to_dict(tape.pop_to_mark()),
}
