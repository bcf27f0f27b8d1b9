"""All checks, by what they look at."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from shardwise.doctor.check import Check
from shardwise.doctor.config.plan_settings import SETTINGS
from shardwise.doctor.config.sharding import SHARDING
from shardwise.doctor.config.shared_work import SHARED_WORK
from shardwise.doctor.foreign.checks import FOREIGN
from shardwise.doctor.machine.health import HEALTH
from shardwise.doctor.machine.limits import LIMITS
from shardwise.doctor.machine.links import LINKS
from shardwise.doctor.machine.node import Node
from shardwise.doctor.machine.nodes import NODES
from shardwise.doctor.machine.preflight_checks import PREFLIGHT
from shardwise.doctor.run.case import Case
from shardwise.doctor.run.run_health import RECORD
from shardwise.doctor.run.transports import TRANSPORTS
from shardwise.doctor.signatures import SIGNATURES
from shardwise.doctor.slow.ranked import SLOW
from shardwise.errors import ExitCode, UserError
from shardwise.plan.planned import Plan

UNPLANNED: Check[Any] = Check(
    "SW100", "error", "The configuration cannot be planned",
    "A setting is wrong, ranks do not divide, or the model does not fit.",
    "do what the evidence says; `shardwise plan FILE` shows the same error",
    lambda _: (),
)  # fmt: skip
"""It has no look of its own: whoever plans finds it."""

PLAN_CHECKS: tuple[Check[Plan], ...] = (*SHARDING, *SHARED_WORK, *SETTINGS)
RUN_CHECKS: tuple[Check[Case], ...] = (*RECORD, *TRANSPORTS)
STATE_CHECKS: tuple[Check[Node], ...] = (*LIMITS, *HEALTH, *LINKS)
"""Of a node, whatever is to run there."""

NODE_CHECKS: tuple[Check[Node], ...] = (*LIMITS, *PREFLIGHT, *HEALTH, *LINKS)

GROUPS: dict[str, tuple[Check[Any], ...]] = {
    "configuration": (UNPLANNED, *PLAN_CHECKS),
    "another tool's file or script": FOREIGN,
    "machine": NODE_CHECKS,
    "nodes beside each other": NODES,
    "run": RUN_CHECKS,
    "run that is slower than its plan": SLOW,
    "lines of logs": SIGNATURES,
}
"""In the order in which they are listed."""

CHECKS: dict[str, Check[Any]] = {check.id: check for group in GROUPS.values() for check in group}

# By the first digit of an id: a configuration, a machine, a run.
_CODES = {"1": ExitCode.CONFIG, "2": ExitCode.ENVIRONMENT}


def exit_code_of(check: Check[Any]) -> ExitCode:
    """The exit code where this check finds an error."""
    return _CODES.get(check.id[2], ExitCode.VERIFY_FAILED)


def check_named(given: str) -> Check[Any]:
    """The check with this id."""
    name = given.strip().upper()
    if name in CHECKS:
        return CHECKS[name]
    near = get_close_matches(name, CHECKS, n=3, cutoff=0.6)
    raise UserError(
        f"there is no check {given}",
        fix=f"did you mean {' or '.join(near)}?" if near else "see all: shardwise doctor --list",
    )
