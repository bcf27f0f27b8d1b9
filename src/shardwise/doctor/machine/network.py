"""Network interfaces and RDMA cards, as the kernel shows them."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an InfiniBand or RoCE card."""

    card: str
    port: str
    state: str
    """Such as `ACTIVE` or `DOWN`."""

    rate: str
    """Such as `400 Gb/sec (4X NDR)`."""


def read_interfaces(root: Path) -> dict[str, str]:
    """Network interfaces and their states, such as `up`."""
    return {
        path.name: _line(path / "operstate")
        for path in sorted((root / "sys/class/net").glob("*"))
        if path.is_dir()
    }


def read_rdma_ports(root: Path) -> tuple[RdmaPort, ...]:
    """All ports of all cards."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return tuple(
        RdmaPort(
            card=path.parent.parent.name,
            port=path.name,
            state=_line(path / "state").partition(": ")[2],
            rate=_line(path / "rate"),
        )
        for path in ports
    )


def own_address() -> str | None:
    """The address that this host's own name leads to; None where it leads nowhere."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def is_port_taken(port: int) -> bool:
    """Whether something listens on this port here."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return True
    return False


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
