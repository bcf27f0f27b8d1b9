"""Rules about what follows from evaluations, as rows."""

from __future__ import annotations

from shardwise.config.held_out import has_held_out
from shardwise.config.rule import Rule, at_least
from shardwise.config.schema import RunConfig


def _evaluates(config: RunConfig) -> bool:
    return config.train.eval_every > 0 and has_held_out(config.data)


_NEEDS = "the run does not evaluate between its steps"
_EVALUATE = "write train.eval_every=100 data.eval_fraction=0.02, or leave {} out"

EVAL_RULES: tuple[Rule, ...] = (
    *at_least(0, "train.eval_every", "train.patience", "train.min_gain"),
    Rule(
        "patience-needs-evaluations",
        "train.patience",
        lambda c: c.train.patience <= 0 or _evaluates(c),
        _NEEDS,
        _EVALUATE.format("train.patience"),
    ),
    Rule(
        "gain-needs-patience",
        "train.min_gain",
        lambda c: c.train.patience > 0 or c.train.min_gain <= 0,
        "train.patience is 0, so it would be ignored",
        "write train.patience=3, or leave train.min_gain out",
    ),
    Rule(
        "best-needs-evaluations",
        "checkpoint.keep_best",
        lambda c: c.checkpoint.keep_best is not True or _evaluates(c),
        _NEEDS,
        _EVALUATE.format("checkpoint.keep_best"),
    ),
)
