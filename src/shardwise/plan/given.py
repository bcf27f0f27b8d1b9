"""A decision that the user may have made: the user's where it was given, else the planner's."""

from __future__ import annotations

from typing import Any

from shardwise.config.schema import RunConfig
from shardwise.config.schema_text import value_at
from shardwise.plan.decisions import Choice, setting_paths

_DEFAULTS = RunConfig()


def decide(config: RunConfig, name: str, chosen: Any, why: str) -> Choice[Any]:
    """The user's value for the decision `name`, or `chosen` for the reason `why`.

    A setting at its default counts as not given.
    """
    path = setting_paths()[name]
    given = value_at(config, path)
    if given != value_at(_DEFAULTS, path):
        return Choice(given, "given", "user")
    return Choice(chosen, why, "rule")
