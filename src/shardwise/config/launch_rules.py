"""Rules about how a run is handed to a scheduler."""

from __future__ import annotations

import re
import shlex

from shardwise.config.rule import Rule, above_zero, at_least
from shardwise.config.schema import RunConfig

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _is_one_line(text: str) -> bool:
    return text.isprintable() and bool(text.strip())


def _has_one_line_each(c: RunConfig) -> bool:
    return all(map(_is_one_line, [*c.launch.setup, *map(str, c.launch.environment.values())]))


def _is_command(c: RunConfig) -> bool:
    try:
        return _is_one_line(c.launch.command) and bool(shlex.split(c.launch.command))
    except ValueError:
        return False


def _all_words(texts: list[str]) -> bool:
    return all(_is_one_line(text) and " " not in text for text in texts)


LAUNCH_RULES: tuple[Rule, ...] = (
    above_zero("launch.walltime_s", "86400"),
    above_zero("launch.grace_s", "300"),
    *at_least(0, "launch.max_requeues"),
    Rule(
        "launch-setup-is-lines",
        "launch.setup",
        _has_one_line_each,
        "each line of it, and each value of launch.environment, is one line of text",
        "write launch.setup=[module load cuda], or leave it out",
    ),
    Rule(
        "launch-command-is-one",
        "launch.command",
        _is_command,
        "it is one command of a shell, with its quotes closed",
        "write launch.command=/opt/env/bin/shardwise, or leave it out",
    ),
    Rule(
        "launch-environment-has-names",
        "launch.environment",
        lambda c: all(map(_NAME.fullmatch, c.launch.environment)),
        "a variable's name has letters, digits and underscores",
        "write launch.environment={{NCCL_SOCKET_IFNAME: ib0}}, or leave it out",
    ),
    Rule(
        "launch-exclude-is-names",
        "launch.exclude",
        lambda c: _all_words(c.launch.exclude) and not any("," in n for n in c.launch.exclude),
        "each is the name of one node",
        "write launch.exclude=[node7,node9], or leave it out",
    ),
    Rule(
        "launch-options-are-options",
        "launch.options",
        lambda c: _all_words(c.launch.options) and all(o[:2] == "--" for o in c.launch.options),
        "each is one option in its long form, with its value after `=`",
        "write launch.options=[--partition=gpu], or leave it out",
    ),
)
