"""What a model learns from answers that people prefer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.config.schema.words import Auto

# `preference.beta` where nobody has set it, as the papers have it.
USUAL_BETA = {"none": 0.1, "dpo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
# These compare with log-probabilities of the model that training begins with.
WITH_REFERENCE = ("dpo", "kto")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceConfig:
    """Training on answers that are compared, instead of on each token by itself. The data is then
    `data.format: pairs` or `labelled`."""

    objective: Literal["none", "dpo", "kto", "orpo", "simpo"] = "none"
    """`dpo`, `orpo` and `simpo` learn from pairs, `kto` from answers with a label (or from pairs,
    each of whose answers then counts by itself). `dpo` and `kto` compare with a reference: the
    model without adapters, or the first weights where there are no adapters. Its log-probabilities
    are computed once, before the first step. `none` trains on the next token."""

    beta: float | Auto = "auto"
    """What log-probabilities are multiplied by (`dpo`, `kto`, `simpo`), or the weight of the odds
    ratio beside the loss of the chosen answer (`orpo`). `auto`: 0.1, and 2 for `simpo`."""

    label_smoothing: float = 0.0
    """`dpo` only: the share of pairs whose two answers are taken to be confused, 0 to 0.5."""

    gamma: float = 1.0
    """`simpo` only: by how much the reward of the chosen answer should be the larger one."""

    kl_term: bool = True
    """`kto` only: compare rewards with how much likelier answers to other prompts have become, as
    the paper does. Answers are exchanged between the prompts of a sequence, and one more forward in
    each step computes them. `false`: compare rewards with 0."""

    desirable_weight: float = 1.0
    """`kto` only: the weight of answers with `label: true`."""

    undesirable_weight: float = 1.0
    """`kto` only: the weight of answers with `label: false`."""
