"""Run something as a user whom file permissions bind, root or not."""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable

# Of linux/capability.h: reading, writing and searching whatever the permissions say.
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
_VERSION_3 = 0x20080522


def run_powerless(act: Callable[[], int]) -> tuple[int, str]:
    """`act` in a child that may do no more than its files' permissions say: its result and what
    it raised."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            _drop_powers()
            code = act()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:  # noqa: BLE001 (whatever it is, the test shows it)
            os.write(into, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(code)
    os.close(into)
    with os.fdopen(out, "rb") as said:
        text = said.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def _drop_powers() -> None:
    """Root keeps its name and loses what lets it pass over permissions."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for low in (0, 1, 2):
        sets[low] &= ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
