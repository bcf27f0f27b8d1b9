"""A run as scripts start it: from its configuration to the verdict on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.config.load import load_config
from shardwise.config.schema import RunConfig
from shardwise.launch.alive import come_alive
from shardwise.launch.last_words import shared_errors
from shardwise.launch.rank_environment import adopt_launcher, is_rank
from shardwise.launch.this_machine import plan_and_run
from shardwise.metrics.callbacks import Callback, name_of_callback
from shardwise.verify.judge import judge_run, record_gates, validate_passed


def train(
    config: RunConfig | str | Path, *overrides: str, callbacks: Sequence[Callback | str] = ()
) -> Path:
    """Plan, start the ranks, wait for them and judge the run; returns the run directory.

    `config` is a file or what `load_config` made of one: `train("run.yaml", "optim.lr=1e-4")`. The
    first rank prints through `sys.stdout`, so a notebook shows it; what fails is a UserError.
    The verdict stands in its record; with `gates.enforce` a gate that failed is an error. Inside
    torchrun (RANK is set) this process is one rank and starts no others.

    `callbacks` are functions, or their names as `module:function`, that the first rank calls with a
    StepLogged, an Evaluated or a CheckpointSaved, beside those of `observe.callbacks`. Ranks import
    them.
    """
    adopt_launcher(os.environ)
    if is_rank(os.environ):
        come_alive(os.environ)
    with shared_errors():
        if not isinstance(config, RunConfig):
            config = load_config(config, overrides)
        elif overrides:
            raise TypeError("overrides are for a file; give them to load_config")
        config = _with_callbacks(config, [name_of_callback(each) for each in callbacks])
    plan = plan_and_run(config)
    if os.environ.get("RANK", "0") == "0":
        gates = judge_run(plan.run_dir)
        record_gates(plan.run_dir, gates)
        if config.gates.enforce:
            validate_passed(plan.run_dir, gates)
    return plan.run_dir


def _with_callbacks(config: RunConfig, names: list[str]) -> RunConfig:
    """The configuration with these callbacks too, as if its file had named them."""
    if not names:
        return config
    observe = replace(config.observe, callbacks=[*config.observe.callbacks, *names])
    return replace(config, observe=observe)
