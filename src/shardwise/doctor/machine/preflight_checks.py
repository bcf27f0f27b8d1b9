"""What `shardwise train` looks at before it starts a rank, as checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.doctor.check import Check
from shardwise.doctor.machine.node import Node
from shardwise.errors import UserError
from shardwise.launch import preflight


def _refusals(*checks: preflight.Check) -> Callable[[Node], Iterator[str]]:
    """Problems that would stop the run. Warnings of the preflight are left to it."""

    def look(node: Node) -> Iterator[str]:
        if node.plan is None:
            return
        for check in checks:
            for found in check(node.plan):
                if isinstance(found, UserError):
                    parts = (found.what, found.why, f"fix: {found.fix}" if found.fix else "")
                    yield "; ".join(filter(None, parts))

    return look


PREFLIGHT: tuple[Check[Node], ...] = (
    Check(
        "SW206", "error", "The run directory cannot take the checkpoints",
        "It cannot be written to, or has no room: the next checkpoint is written whole before the "
        "oldest is removed.",
        "make room, lower checkpoint.keep, or choose another place with runs_dir=DIRECTORY",
        _refusals(preflight.check_run_directory),
    ),
    Check(
        "SW210", "error", "The data cannot be read",
        "`shardwise train` refuses it before ranks start.",
        "check data.path, data.name and data.field",
        _refusals(preflight.check_data),
    ),
    Check(
        "SW211", "error", "The tokenizer is missing or does not fit the model",
        "`shardwise train` refuses it before ranks start.",
        "name one with data.tokenizer",
        _refusals(preflight.check_tokenizer),
    ),
    Check(
        "SW212", "error", "The first weights are not whole",
        "A missing or truncated file would be met only when a rank reads it.",
        "fetch the weights anew, or check model.weights_from and adapter.weights_from",
        _refusals(preflight.check_weights, preflight.check_adapter),
    ),
    Check(
        "SW213", "error", "A package is missing",
        "A setting needs it, and every rank would fail at its import.",
        "install what the evidence names, or leave the setting out",
        _refusals(preflight.check_attention, preflight.check_extras),
    ),
    Check(
        "SW214", "error", "The port of the metrics is taken",
        "Two runs on one host cannot serve their metrics on one port.",
        "write another observe.prometheus_port",
        _refusals(preflight.check_ports),
    ),
)  # fmt: skip
