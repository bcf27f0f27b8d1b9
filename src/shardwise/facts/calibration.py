"""Measured rates of this machine, kept between plans. `shardwise plan --calibrate` writes them.

There is one file for each kind of device and layout of ranks, such as `h200-8.json`, or
`aarch64-cpu-2-cores-2x2.json` for two emulated nodes on one CPU. A GPU works at the same rate in
any machine, so a plan takes the rates of any machine with such GPUs. Ranks on a CPU share its cores
and its memory, so their rates hold for the same number of ranks only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from shardwise.errors import ExitCode, UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.collective_cost import Link
from shardwise.facts.rates import Rates, rates_of
from shardwise.files import cache_folder, read_json, replace_file

Curves = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements of one kind of device, made on all ranks of one machine at the same time."""

    device: str
    """The kind of device. The file is named after it."""

    device_name: str
    created: str
    """Date and time in UTC."""

    torch: str
    """The version that it was measured with."""

    ranks: int
    domain: int
    """The number of ranks that `inside` was measured between."""

    rates: Rates
    inside: Link | None
    """The link between ranks of one domain; None where one rank was alone."""

    between: Link | None
    """The link between all ranks, where they form several domains."""

    curves: Curves = field(hash=False)
    """Every single measurement, by what was measured."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """The inverse of `asdict`. Raises ValueError where a rate is not above 0."""
        links = {name: Link(**data[name]) if data[name] else None for name in ("inside", "between")}
        found = cls(**{**data, "rates": Rates.from_dict(data["rates"]), **links})
        _validate(found)
        return found

    def path(self) -> Path:
        """Where it is kept."""
        return calibration_folder() / f"{self.device}-{_layout(self.ranks, self.domain)}.json"

    def save(self) -> Path:
        """Write it atomically, over an earlier one, and return the path."""
        path = self.path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, (json.dumps(asdict(self), indent=1) + "\n").encode())
        except OSError as error:
            raise UserError(
                f"cannot save the measurements in {path}",
                why=str(error),
                fix="name a directory that you may write to: export SHARDWISE_CACHE=DIR",
                code=ExitCode.ENVIRONMENT,
            ) from None
        return path


def load_calibration(path: Path) -> Calibration:
    """Read a saved calibration."""
    try:
        return Calibration.from_dict(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a calibration",
            why=f"{type(error).__name__}: {error}",
            fix=f"delete it: rm {quote(str(path))}; to measure again: shardwise plan --calibrate",
        ) from None


def calibration_folder() -> Path:
    """Where calibrations are kept."""
    return cache_folder("calibration")


def device_key(cluster: ClusterSpec) -> str:
    """The kind of device in file names. For CPUs the number of cores is part of it."""
    name = cluster.gpu.name if cluster.gpu else cluster.device_name
    words = f"{name} {os.cpu_count()} cores" if cluster.device == "cpu" else name
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def rates_for(cluster: ClusterSpec) -> Rates | None:
    """Measured rates, else the catalogue's; None where nothing is known."""
    catalogue = None if cluster.gpu is None else rates_of(cluster.gpu)
    found = next(_calibrations(cluster), None)
    if found is None:
        return catalogue
    # Rates that were not measured, such as float8 on a torch without it, come from the catalogue.
    known = {} if catalogue is None else dict(catalogue.matmul_flops)
    return replace(found.rates, matmul_flops=known | dict(found.rates.matmul_flops))


def with_measured_links(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with the links that were measured in domains like its own."""
    for found in _calibrations(cluster):
        if found.domain == cluster.nvlink_domain and found.inside is not None:
            return replace(cluster, measured_inside=found.inside, measured_between=found.between)
    return cluster


def calibration_digest(cluster: ClusterSpec) -> str | None:
    """A hash of the measurements that a plan for the cluster would take on this machine."""
    own, others = _files(cluster)
    digest = hashlib.sha256()
    for path in (*own, *sorted(others)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest() if own or others else None


def _calibrations(cluster: ClusterSpec) -> Iterator[Calibration]:
    """Calibrations of the cluster's devices: those of its own layout first, then the newest."""
    own, others = _files(cluster)
    yield from map(load_calibration, own)
    key = device_key(cluster)
    same_kind = [found for found in map(load_calibration, others) if found.device == key]
    yield from sorted(same_kind, key=lambda found: found.created, reverse=True)


def _files(cluster: ClusterSpec) -> tuple[list[Path], list[Path]]:
    """(files of the cluster's own layout, files of other layouts whose rates hold for it too)."""
    folder, key = calibration_folder(), device_key(cluster)
    own = folder / f"{key}-{_layout(cluster.world_size, cluster.nvlink_domain)}.json"
    others = [] if cluster.device == "cpu" else folder.glob(f"{key}-*.json")
    return [own] if own.exists() else [], [path for path in others if path != own]


def _layout(ranks: int, domain: int) -> str:
    return str(ranks) if ranks <= domain else f"{ranks // domain}x{domain}"


def _validate(found: Calibration) -> None:
    """Raise for an impossible rate, which would otherwise only show as a strange plan."""
    rates, links = found.rates, (found.inside, found.between)
    numbers = [
        *rates.matmul_flops.values(),
        rates.attention_forward_flops,
        rates.attention_backward_flops,
        rates.memory_bytes_per_s,
        *(link.bytes_per_s for link in links if link is not None),
    ]
    if not rates.matmul_flops or not all(float(number) > 0 for number in numbers):
        raise ValueError("a rate is not above 0")
