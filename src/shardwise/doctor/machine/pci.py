"""PCIe bridges with access control (ACS) on, read from the kernel's view of their registers."""

from __future__ import annotations

import struct
from pathlib import Path

_BRIDGE_CLASS = "0x0604"
_FIRST_EXTENDED = 0x100
_ACS_CAPABILITY = 0x000D
_CONTROL = 6
# Source validation, request and completion redirect, upstream forwarding: with any of them traffic
# between two devices goes up to the root and back.
_REDIRECTS = 0b11101
# The registers of one device. A list of capabilities that does not end is broken.
_MAX_BYTES = 4096
_MAX_CAPABILITIES = 64


def redirecting_bridges(root: Path) -> tuple[str, ...] | None:
    """Addresses of bridges that send traffic between devices through the root; None where the
    registers cannot be read, as without privileges."""
    found, is_readable = [], False
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            kind = (device / "class").read_text(encoding="ascii").strip()
            with (device / "config").open("rb") as file:
                registers = file.read(_MAX_BYTES)
        except OSError:
            continue
        if not kind.startswith(_BRIDGE_CLASS):
            continue
        is_readable = is_readable or len(registers) > _FIRST_EXTENDED
        if _acs_control(registers) & _REDIRECTS:
            found.append(device.name)
    return tuple(found) if is_readable else None


def _acs_control(registers: bytes) -> int:
    at = _FIRST_EXTENDED
    for _ in range(_MAX_CAPABILITIES):
        if at < _FIRST_EXTENDED or at + 8 > len(registers):
            return 0
        header = struct.unpack_from("<I", registers, at)[0]
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int(struct.unpack_from("<H", registers, at + _CONTROL)[0])
        at = header >> 20
    return 0
