"""The state of each GPU, as nvidia-smi tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.facts.probe import query_nvidia_smi

# All are asked at once, because a question can take a second. A driver that does not know a field
# refuses the whole question, and is then asked line by line.
_QUESTIONS = (
    "index,name,driver_version",
    "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending,remapped_rows.failure",
    "retired_pages.pending",
    "clocks_throttle_reasons.hw_thermal_slowdown,clocks_throttle_reasons.sw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown,clocks_throttle_reasons.hw_slowdown",
    "power.limit,power.default_limit",
    "clocks.max.sm,clocks.applications.graphics,clocks.default_applications.graphics",
    "temperature.gpu,memory.used",
    "mig.mode.current",
    "compute_mode",
)
_ACTIVE = "Active"
_WITHOUT_VALUE = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "")


@dataclass(frozen=True, slots=True)
class GpuState:
    """What nvidia-smi says of one GPU, by field."""

    fields: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its number and name, as people call it."""
        return f"GPU {self.fields.get('index', '?')} ({self.fields.get('name', 'unknown')})"

    @property
    def driver(self) -> str | None:
        """The version of the driver."""
        return self.text("driver_version")

    def text(self, field: str) -> str | None:
        """A value; None where the driver has none."""
        value = self.fields.get(field, "")
        return None if value in _WITHOUT_VALUE else value

    def number(self, field: str) -> float | None:
        """A number; None where there is none."""
        try:
            return float(self.fields.get(field, ""))
        except ValueError:
            return None

    def is_active(self, field: str) -> bool:
        """Whether a reason to throttle holds."""
        return self.fields.get(field) == _ACTIVE


def read_gpus(environ: Mapping[str, str]) -> tuple[GpuState, ...]:
    """All GPUs of this node; none without a driver."""
    if environ.get("CUDA_VISIBLE_DEVICES") == "":
        return ()
    everything = ",".join(_QUESTIONS)
    if rows := query_nvidia_smi(everything, environ):
        return tuple(GpuState(_named(everything, row)) for row in rows)
    states: list[dict[str, str]] = []
    for question in _QUESTIONS:
        rows = query_nvidia_smi(question, environ)
        if not states:
            if not rows:
                return ()
            states = [{} for _ in rows]
        if len(rows) == len(states):
            for state, row in zip(states, rows, strict=True):
                state.update(_named(question, row))
    return tuple(GpuState(state) for state in states)


def _named(question: str, row: list[str]) -> dict[str, str]:
    return dict(zip(question.split(","), row, strict=True))
