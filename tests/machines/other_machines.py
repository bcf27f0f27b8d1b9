"""Machines that are not this one, and what a Python process sees of them."""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

VARIABLE = "SHARDWISE_TEST_MACHINE"
GIB = 2**30
_CPUINFO = "/proc/cpuinfo"
_ARM = (
    "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd bf16 i8mm\nCPU implementer\t: 0x41\n"
)
_X86 = "processor\t: 0\nmodel\t\t: 85\nmodel name\t: {name}\nstepping\t: 7\nflags\t\t: {flags}\n"


class Machine(NamedTuple):
    """What its files and its kernel say."""

    id: str
    architecture: str
    cpuinfo: str | None
    cores: int
    gibibytes: int
    has_bf16: bool = False


def _x86(name: str, flags: str) -> str:
    return _X86.format(name=name, flags=flags)


MACHINES = (
    Machine("Arm without a name", "aarch64", _ARM, 2, 24, True),
    Machine("Arm, old", "aarch64", "Features\t: fp asimd\n", 64, 128),
    Machine("Intel", "x86_64", _x86("Intel(R) Xeon(R) CPU @ 2.20GHz", "fpu"), 4, 16),
    Machine(
        "Intel, a Processor",
        "x86_64",
        _x86("Intel(R) Xeon(R) Processor @ 2.50GHz", "fpu avx512_bf16"),
        2,
        24,
        True,
    ),
    Machine("AMD", "x86_64", _x86("AMD EPYC 7B13", "fpu"), 256, 1024),
    Machine("one core", "x86_64", _x86("QEMU Virtual version 2.5+", ""), 1, 2),
    Machine("empty name", "x86_64", _x86("", "fpu"), 8, 24),
    Machine("name of blanks", "x86_64", _x86("  \t", "fpu"), 8, 24),
    Machine("brackets", "x86_64", _x86("[bold]A: {b} %s", "fpu"), 3, 24),
    Machine("no /proc", "arm64", None, 10, 32),
    Machine("nothing is known", "", "", 8, 24),
)


def pretences(machine: Machine) -> Iterator[tuple[object, str, Callable[..., Any]]]:
    """(place, name, function): what to put where, so that a process finds itself on `machine`.

    Installed packages get the truth: torch compiles code for the CPU that it is on, and
    pytest-xdist starts one worker for each core.
    """

    def instead(place: object, name: str, answer: Callable[..., Any]) -> Any:
        real = getattr(place, name)

        def call(*args: Any, **named: Any) -> Any:
            asker = sys._getframe(1).f_code.co_filename
            return (real if "site-packages" in asker else answer)(*args, **named)

        return place, name, call

    yield instead(platform, "machine", lambda: machine.architecture)
    yield instead(platform, "processor", lambda: machine.architecture)
    yield instead(os, "cpu_count", lambda: machine.cores)
    yield instead(os, "sched_getaffinity", lambda _pid: set(range(machine.cores)))
    if hasattr(os, "process_cpu_count"):  # from Python 3.13
        yield instead(os, "process_cpu_count", lambda: machine.cores)

    sysconf, is_there, read = os.sysconf, pathlib.Path.exists, io.open
    pages = machine.gibibytes * GIB // sysconf("SC_PAGE_SIZE")
    yield instead(os, "sysconf", lambda key: pages if key == "SC_PHYS_PAGES" else sysconf(key))

    def exists(path: pathlib.Path, **named: bool) -> bool:
        return machine.cpuinfo is not None if str(path) == _CPUINFO else is_there(path, **named)

    def opened(path: Any, *args: Any, **named: Any) -> Any:
        if path is None or str(path) != _CPUINFO:
            return read(path, *args, **named)
        if machine.cpuinfo is None:
            raise FileNotFoundError(_CPUINFO)
        return io.StringIO(machine.cpuinfo)

    yield instead(pathlib.Path, "exists", exists)
    yield instead(io, "open", opened)
    yield instead(builtins, "open", opened)
