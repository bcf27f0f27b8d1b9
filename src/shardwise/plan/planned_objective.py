"""What a run minimises, in a plan."""

from __future__ import annotations

from shardwise.config.schema import USUAL_BETA, WITH_REFERENCE, RunConfig
from shardwise.plan.decisions import Choice

_BYTES_FOR_AN_ANSWER = 4


def choose_kl_term(config: RunConfig) -> Choice[bool]:
    """Whether rewards are compared with those of answers to other prompts."""
    if config.preference.objective != "kto":
        return Choice(False, "it belongs to KTO", "rule")
    if not config.preference.kl_term:
        return Choice(False, "given: rewards are compared with 0", "user")
    why = "rewards are compared with those of exchanged answers: one more forward in each step"
    return Choice(True, why, "rule")


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
