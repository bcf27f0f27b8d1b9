"""Rules about runs that count passes over their data, as rows."""

from __future__ import annotations

from shardwise.config.rule import Rule, above_zero
from shardwise.config.schema import RunConfig, TrainConfig

_USUAL_STEPS = TrainConfig().steps


def knows_steps(config: RunConfig) -> bool:
    """Whether the configuration says how many steps the run has. Epochs become steps once the data
    was read."""
    return config.train.epochs is None


EPOCH_RULES: tuple[Rule, ...] = (
    above_zero("train.epochs", "3"),
    Rule(
        "epochs-are-the-steps",
        "train.epochs",
        lambda c: knows_steps(c) or c.train.steps == _USUAL_STEPS,
        "train.steps={c.train.steps} says how long the run is, too",
        f"leave train.steps out (train.steps={_USUAL_STEPS} counts as that), or leave train.epochs "
        "out",
    ),
    Rule(
        "epochs-need-an-end",
        "train.epochs",
        lambda c: knows_steps(c) or c.data.source != "synthetic",
        "data.source=synthetic has no end, and so no epochs",
        "write train.steps=1000 and leave train.epochs out, or name data with an end: "
        "data.source=text data.path=FILES",
    ),
    Rule(
        "outer-steps-need-steps",
        "train.epochs",
        lambda c: knows_steps(c) or c.num_sites == 1,
        "sites end together after an outer step, for which the number of steps must be known",
        "write train.steps={c.diloco.steps} or a multiple of it, and leave train.epochs out",
    ),
)
