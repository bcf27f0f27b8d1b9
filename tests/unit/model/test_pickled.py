"""Pickles read as data: the same values as the unpickler gives, and never a call."""

from __future__ import annotations

import os
import pickle
import resource
import struct
from pathlib import Path
from typing import Any

import pytest

from shardwise.model.pickled import Described, Name, RefusedPickle, read_pickle

PLAIN = {
    "text": ["a", "b" * 300, "ü", ""],
    "numbers": (0, 255, 65535, -1, 2**31, -(2**63), 2**80, 1.5),
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "constants": [True, False, None],
    "nested": {"list": [[1], [2, 3]], 7: {}},
}
STOP = b"."


class Point:
    def __init__(self) -> None:
        self.x, self.y = 1, (2, 3)


class Trap:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_what_the_unpickler_gives(protocol: int) -> None:
    shared = [1, 2]
    value = {**PLAIN, "shared": [shared, shared]}
    assert read_pickle(pickle.dumps(value, protocol), ()) == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_an_object_of_an_allowed_name_is_described(protocol: int) -> None:
    allowed = {Name(__name__, "Point")}
    found = read_pickle(pickle.dumps([Point()], protocol), allowed)[0]
    assert type(found) is Described
    assert (found.made_by, found.args) == (Name(__name__, "Point"), ())
    assert found.state == {"x": 1, "y": (2, 3)}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_another_name_is_refused_and_not_called(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"x": Trap(tmp_path / "canary")}, protocol)
    with pytest.raises(RefusedPickle, match=r"posix\.mkdir"):
        read_pickle(data, {Name(__name__, "Point")})
    assert not (tmp_path / "canary").exists()
    pickle.loads(data)
    assert (tmp_path / "canary").exists(), "the trap is a real one"


def test_an_allowed_name_is_not_called_either(tmp_path: Path) -> None:
    data = pickle.dumps(Trap(tmp_path / "canary"))
    found = read_pickle(data, {Name("posix", "mkdir")})
    assert found.args == (str(tmp_path / "canary"),)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no pickle",
        b'{"json": true}',
        b"\x80\x04",
        pickle.dumps(PLAIN)[:-5],
        b"\x80\x04)",  # no end
        b"\x80\x04" + STOP,  # nothing to give
        b"\x80\x04\x85" + STOP,  # a tuple of more than there is
        b"\x80\x04h\x07" + STOP,  # a memory that was never written
        b"\x80\x04u" + STOP,  # no mark
        b"\x80\x04)(K\x01e" + STOP,  # append to a tuple
        b"\x80\x04](K\x01K\x02u" + STOP,  # set an item of a list
        b"\x80\x04})K\x01s" + STOP,  # a tuple as key
        b"\x80\x04}]K\x01s" + STOP,  # a list as key
        b"\x80\x04}}b" + STOP,  # state for a dictionary
        b"\x80\x04K\x01)R" + STOP,  # call a number
        b"\x80\x04K\x01K\x02\x93" + STOP,  # names that are numbers
        b"P1\n" + STOP,  # persistent ids
        b"\x80\x04K\x01Q" + STOP,
        b"\x80\x02\x82\x01" + STOP,  # the registry of extensions
        b"(iposix\nmkdir\n" + STOP,
        b"(cposix\nmkdir\nX\x01\x00\x00\x00ao" + STOP,
        b"\x80\x05\x97" + STOP,  # a buffer from outside
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + STOP,  # a terabyte
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x" + STOP,
        b"\x80\x04\x95" + struct.pack("<Q", 2**62) + STOP,
        b"I" + b"9" * 100_000 + b"\n" + STOP,
    ],
    ids=lambda data: repr(data)[:40],
)
def test_what_is_no_plain_data_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedPickle):
        read_pickle(data, ())


def test_a_far_place_in_the_memory_takes_none() -> None:
    """CPython's own unpickler makes room for all places before it: 64 GB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = b"\x80\x02K\x01r" + struct.pack("<I", 2**32 - 1) + STOP
    assert read_pickle(data, ()) == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_tuples_that_hold_each_other_twice_are_no_keys() -> None:
    """Sixty of them would take 2**60 steps to hash."""
    doubled = b")\x94" + b"".join(
        b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(60)
    )
    with pytest.raises(RefusedPickle, match="key of type tuple"):
        read_pickle(b"\x80\x04" + doubled + b"}h\x3cK\x01s" + STOP, ())


def test_deep_nesting_is_only_deep() -> None:
    found = read_pickle(b"\x80\x04)" + b"\x85" * 200_000 + STOP, ())
    assert type(found) is tuple
