"""What a run minimises, in a plan."""

from __future__ import annotations

from shardwise.config.schema import USUAL_BETA, WITH_REFERENCE, RunConfig
from shardwise.plan.decisions import Choice

_BYTES_FOR_AN_ANSWER = 4


def choose_objective(config: RunConfig) -> Choice[str]:
    """The user's objective, what it compares with, and what that costs."""
    objective = config.preference.objective
    if objective == "none":
        return Choice("none", "not asked for: the next token is trained on", "rule")
    beta = USUAL_BETA[objective] if config.preference.beta == "auto" else config.preference.beta
    parts = [f"given; beta {beta:g}", "backward computes the logits of each slice again"]
    if objective not in WITH_REFERENCE:
        parts.append("it needs no reference")
    else:
        whose = "the first weights"
        if config.adapter.method != "none":
            whose = "the model without adapters"
        parts.append(
            f"the reference is {whose}: one forward over all sequences before the first step, kept "
            f"with {_BYTES_FOR_AN_ANSWER} bytes for each answer"
        )
    return Choice(objective, "; ".join(parts), "user")
