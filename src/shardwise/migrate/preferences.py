"""What other tools say about answers that are compared."""

from __future__ import annotations

from typing import Any

from shardwise.migrate.foreign_values import number
from shardwise.migrate.key_rules import KeyRule, to
from shardwise.migrate.line import Outcome, always, mapped, other_task

OBJECTIVES = ("dpo", "kto", "orpo", "simpo")
NO_ROLLOUTS = "answers are compared by DPO, KTO, ORPO and SimPO; there are no rewards and rollouts"


def objective(word: Any) -> Outcome:
    """The objective by its name, and the records that it learns from."""
    name = str(word).strip().lower()
    if name in ("none", "false", ""):
        return always("the next token is trained")
    if name not in OBJECTIVES:
        return other_task(NO_ROLLOUTS)
    return mapped(
        {"preference.objective": name, "data.format": records_of(name)}, "answers are compared"
    )


def records_of(name: str) -> str:
    """The format of the data of an objective."""
    return "labelled" if name == "kto" else "pairs"


BETA: KeyRule = to("preference.beta", number, "as for the objective")
GAMMA: KeyRule = to("preference.gamma", number, "the margin of SimPO")
SMOOTHING: KeyRule = to("preference.label_smoothing", number, "of DPO")
DESIRABLE: KeyRule = to("preference.desirable_weight", number, "of KTO")
UNDESIRABLE: KeyRule = to("preference.undesirable_weight", number, "of KTO")
