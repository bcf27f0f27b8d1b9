"""Rules about the preference section, as rows."""

from __future__ import annotations

from shardwise.config.rule import Rule, above_zero, at_least, within
from shardwise.config.schema import RunConfig
from shardwise.config.schema_text import value_at

_DEFAULTS = RunConfig()


def _only_for(field: str, *objectives: str) -> Rule:
    """A row for a setting that has no effect with other objectives."""

    def holds(config: RunConfig) -> bool:
        given = value_at(config, field) != value_at(_DEFAULTS, field)
        return config.preference.objective in objectives or not given

    return Rule(
        f"{field}-needs-objective",
        field,
        holds,
        "preference.objective={c.preference.objective} would ignore it",
        f"write preference.objective={objectives[0]}, or leave {field} out",
    )


PREFERENCE_RULES: tuple[Rule, ...] = (
    _only_for("preference.beta", "dpo", "kto", "orpo", "simpo"),
    _only_for("preference.label_smoothing", "dpo"),
    _only_for("preference.gamma", "simpo"),
    _only_for("preference.kl_term", "kto"),
    _only_for("preference.desirable_weight", "kto"),
    _only_for("preference.undesirable_weight", "kto"),
    above_zero("preference.beta", "0.1"),
    within("preference.label_smoothing", 0, 0.5),
    *at_least(0, "preference.gamma"),
    above_zero("preference.desirable_weight", "1"),
    above_zero("preference.undesirable_weight", "1"),
    Rule(
        "objective-needs-pairs",
        "data.format",
        lambda c: (
            c.preference.objective not in ("dpo", "orpo", "simpo") or c.data.format == "pairs"
        ),
        "preference.objective={c.preference.objective} compares two answers to one prompt",
        "write data.format=pairs, for rows with prompt, chosen and rejected",
    ),
    Rule(
        "kl-term-needs-other-prompts",
        "data.packing",
        lambda c: (
            c.preference.objective != "kto"
            or not c.preference.kl_term
            or c.data.packing in ("auto", "best_fit")
        ),
        "KTO's KL term exchanges answers between the prompts of a sequence, and here each holds "
        "one prompt",
        "leave data.packing out, or write preference.kl_term=false",
    ),
    Rule(
        "kto-needs-labels",
        "data.format",
        lambda c: c.preference.objective != "kto" or c.data.has_preferences,
        "preference.objective=kto learns from answers with labels",
        "write data.format=labelled, for rows with prompt, completion and label, or "
        "data.format=pairs",
    ),
    Rule(
        "preferences-need-objective",
        "data.format",
        lambda c: not c.data.has_preferences or c.preference.objective != "none",
        "preference.objective is none, which trains on the next token of every answer alike",
        "write preference.objective=dpo (or kto, orpo, simpo), or data.format=auto",
    ),
    Rule(
        "preferences-are-whole",
        "data.packing",
        lambda c: not c.data.has_preferences or c.data.packing != "cut",
        "answers that are compared stay whole",
        "leave data.packing out, or write data.packing=one",
    ),
)
