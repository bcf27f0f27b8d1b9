"""How the weights in a directory are quantised, by the config.json beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.files import read_json

FIELD = "quantization_config"
# What is dequantised as it is read.
MXFP4, FP8 = "mxfp4", "fp8"
_UNPACKED = "modules_to_not_convert"
_MAX_CONFIG_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Quantization:
    """How stored weights are packed."""

    method: str
    block: tuple[int, int] | None = None
    """fp8: rows and columns that share a scale; None where a whole tensor has one."""

    unpacked: tuple[str, ...] = ()
    """Names or patterns of the modules whose weights are plain."""


def quant_method(hf_config: Mapping[str, Any]) -> str | None:
    """What config.json calls the way in which its weights are quantised; None for plain weights."""
    found = hf_config.get(FIELD)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    return str(method or "a method without a name")


def read_quantization(directory: Path) -> Quantization | None:
    """How the weights in `directory` are quantised; None for plain weights.

    Raises for what cannot be dequantised here. A directory may have no config.json: Accelerate and
    DCP write none, and their weights are plain.
    """
    file = directory / "config.json"
    try:
        hf_config = read_json(file, _MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {file}: {error}", fix="fetch or save the file anew"
        ) from error
    return quantization_in(hf_config, file) if isinstance(hf_config, Mapping) else None


def quantization_in(hf_config: Mapping[str, Any], place: Path | str) -> Quantization | None:
    """The same by a config.json that was read, which is said to be in `place`."""
    method = quant_method(hf_config)
    if method is None:
        return None
    if method not in (MXFP4, FP8):
        directory = place.parent if isinstance(place, Path) else place
        raise UserError(
            f"the weights in {directory} are quantised with {method}",
            why=f"training needs plain weights, and only {MXFP4} and {FP8} are dequantised here",
            fix="name a copy in bf16 or fp32: model.name=DIR or model.weights_from=DIR, or write "
            "model.weights=random",
        )
    settings = hf_config[FIELD]
    block = _block(settings, place) if method == FP8 else None
    return Quantization(method, block, _unpacked(settings, place))


def _unpacked(settings: Mapping[str, Any], place: Path | str) -> tuple[str, ...]:
    names = settings.get(_UNPACKED)
    try:
        patterns = [re.compile(name).pattern for name in names or ()]
    except (TypeError, re.error) as error:
        raise UserError(
            f"{place} has {_UNPACKED}={names!r} in {FIELD}",
            why=f"it must be names or patterns of modules: {error}",
            fix="fetch or save the file anew",
        ) from error
    return tuple(patterns)


def _block(settings: Mapping[str, Any], file: Path | str) -> tuple[int, int] | None:
    match settings.get("weight_block_size"):
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise UserError(
                f"{file} has weight_block_size={other!r} in {FIELD}",
                why="it must be the rows and columns that share a scale, such as [128, 128]",
                fix="fetch or save the file anew",
            )
