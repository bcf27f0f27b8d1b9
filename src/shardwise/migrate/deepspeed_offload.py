"""What DeepSpeed keeps in host memory: the optimizer, or parameters too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.migrate.foreign_values import flag
from shardwise.migrate.key_rules import KeyRule, drop, each, to
from shardwise.migrate.line import BadValueError, Outcome, always, changed, mapped
from shardwise.migrate.source import Source

_PARAMETERS = ("offload_param.device", "cpu_offload_param", "cpu_offload_params")
_OPTIMIZER = ("offload_optimizer.device", "cpu_offload")
_PLACES = {
    **dict.fromkeys(("none", "false", "no", "0"), "none"),
    **dict.fromkeys(("cpu", "true", "yes", "1"), "cpu"),
    "nvme": "nvme",
}
_WHOLE = {"memory.offload": "cpu"}
_BOTH = "parameters, gradients and optimizer are in host memory"
_TOGETHER = "FSDP2 moves parameters and optimizer together, so both are in host memory"
_MOMENTS = {"memory.offload_optimizer": True}
_PAGED = "Adam's moments are in host memory; the update and fp32 parameters stay on the device"
_NVME = "nothing is kept on NVMe, so host memory must hold it"
_PINNED = "pinned host memory"


def offload_rules(prefix: str) -> dict[str, KeyRule]:
    """The rules of `zero_optimization`, whose keys begin with the prefix."""
    parameters = [f"{prefix}{key}" for key in _PARAMETERS]
    optimizer = [f"{prefix}{key}" for key in _OPTIMIZER]
    return {
        **each(parameters_rule(optimizer), parameters),
        **each(optimizer_rule(parameters), optimizer),
        f"{prefix}offload_param.pin_memory": to("memory.pin_memory", flag, _PINNED),
        f"{prefix}offload_optimizer.pin_memory": _pinning_rule(parameters),
        f"{prefix}cpu_offload_use_pin_memory": to("memory.pin_memory", flag, _PINNED),
        f"{prefix}offload_param.*": drop("host memory is the only place beside the device"),
        f"{prefix}offload_optimizer.*": drop("host memory is the only place beside the device"),
    }


def parameters_rule(optimizer: Sequence[str]) -> KeyRule:
    """Where parameters are; `optimizer` are the keys that say where the optimizer is."""

    def translate(value: Any, source: Source) -> Outcome:
        place = _place(value)
        if place == "none":
            return mapped({"memory.offload": "none"}, "they are on the device")
        if place == "nvme":
            return changed(_WHOLE, _NVME)
        return mapped(_WHOLE, _BOTH) if _leaves(source, optimizer) else changed(_WHOLE, _TOGETHER)

    return KeyRule(translate)


def optimizer_rule(parameters: Sequence[str]) -> KeyRule:
    """Where the optimizer is; `parameters` are the keys that say where parameters are."""

    def translate(value: Any, source: Source) -> Outcome:
        place = _place(value)
        if not _leaves(source, parameters):
            if place == "none":
                return mapped({"memory.offload_optimizer": False}, "it is on the device")
            return changed(_MOMENTS, f"{_NVME}: {_PAGED}" if place == "nvme" else _PAGED)
        if place == "cpu":
            return mapped(_WHOLE, _BOTH)
        return changed(_WHOLE, _NVME if place == "nvme" else _TOGETHER)

    return KeyRule(translate)


def _pinning_rule(parameters: Sequence[str]) -> KeyRule:
    def translate(value: Any, source: Source) -> Outcome:
        pins = flag(value)
        if _leaves(source, parameters):
            return mapped({"memory.pin_memory": pins}, _PINNED)
        why = "moments of a GPU are always in pinned host memory"
        return always(why) if pins else changed({}, why)

    return KeyRule(translate)


def _place(value: Any) -> str:
    place = _PLACES.get(str(value).strip().lower())
    if place is None:
        raise BadValueError(f"`{value}` is none of none, cpu and nvme")
    return place


def _leaves(source: Source, keys: Sequence[str]) -> bool:
    """Whether the file moves it from the device."""
    return any(_PLACES.get(str(source.get(key)).strip().lower(), "none") != "none" for key in keys)
