"""The price of a GPU-hour, from an editable YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import Any

from shardwise.config.schema import ClusterConfig
from shardwise.config.trees import read_yaml
from shardwise.errors import UserError
from shardwise.facts.cluster import ClusterSpec
from shardwise.facts.gpus import find_gpu
from shardwise.files import read_bytes

SAMPLE = Path(__file__).with_name("prices.yaml")
# A line for each kind of GPU.
_MAX_BYTES = 2**16
_FIX = f"leave cluster.prices out, or start from the sample: cp {quote(str(SAMPLE))} prices.yaml"


@dataclass(frozen=True, slots=True)
class Price:
    """USD for an hour of the whole cluster, and where the figure is from."""

    usd_per_hour: float
    source: str
    """Whose list of which day: 'RunPod, 2026-08-22'."""


@dataclass(frozen=True, slots=True)
class _Rate:
    usd: float
    source: str


def price_of(cluster: ClusterSpec, config: ClusterConfig, *, offload: bool) -> Price | None:
    """The price of the cluster; None where it is not known."""
    path = SAMPLE if config.prices is None else Path(config.prices)
    rates, offload_node = _read(path)
    if config.usd_per_gpu_hour != "auto":
        rate = _Rate(config.usd_per_gpu_hour, "cluster.usd_per_gpu_hour")
    elif cluster.gpu is not None and cluster.gpu.name in rates:
        rate = rates[cluster.gpu.name]
    else:
        return None
    extra = offload_node * cluster.num_nodes if offload else 0.0
    return Price(rate.usd * cluster.world_size + extra, rate.source)


def _read(path: Path) -> tuple[Mapping[str, _Rate], float]:
    """(the rate of each kind, USD of an offload node-hour)."""
    try:
        return _parse(path, read_bytes(path, _MAX_BYTES))
    except OSError as error:
        raise UserError(f"cannot read the prices in {path}", why=str(error), fix=_FIX) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is not a list of prices",
            why=f"{type(error).__name__}: {error}",
            fix=f"{_FIX}; it needs `gpu_hour:` with a number for each kind of GPU",
        ) from None


# The page of a plan asks for the price of dozens of clusters.
@lru_cache(maxsize=1)
def _parse(path: Path, text: bytes) -> tuple[Mapping[str, _Rate], float]:
    data = read_yaml(text.decode("utf-8"), lambda line: f"{path}:{line}").tree
    rates = {
        find_gpu(str(kind)).name: _rate(entry, path.name)
        for kind, entry in data["gpu_hour"].items()
    }
    return rates, _usd(data.get("offload_node_hour", 0.0))


def _rate(entry: Any, file: str) -> _Rate:
    """A number, or a mapping that also says whose list of which day has it."""
    if not isinstance(entry, Mapping):
        return _Rate(_usd(entry), file)
    said = [str(entry[key]) for key in ("from", "date") if key in entry]
    return _Rate(_usd(entry["usd"]), ", ".join(said) or file)


def _usd(entry: Any) -> float:
    value = float(entry)
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{value} is no price")
    return value
