"""Rules about what a run shows of itself, as rows."""

from __future__ import annotations

import re

from shardwise.config.epoch_rules import knows_steps
from shardwise.config.rule import Rule
from shardwise.config.schema import RunConfig


def _profile_fits(c: RunConfig) -> bool:
    """Inside the run, and not cut off by a stop; one that a stop leaves for later is fine."""
    first, stop = c.observe.profile, c.train.stop_after
    if first is None or not knows_steps(c):
        return True
    last = first + c.observe.profile_steps - 1
    return last <= c.train.steps and (stop is None or not first <= stop < last)


def _earlier_profile(c: RunConfig) -> str:
    """The latest steps that can be profiled, and as many of them as there are."""
    end = c.train.steps if c.train.stop_after is None else c.train.stop_after
    first = max(1, end - c.observe.profile_steps + 1)
    fewer = f" observe.profile_steps={end}" if end < c.observe.profile_steps else ""
    return f"write observe.profile={first}{fewer} or less, or leave observe.profile out"


def _names_function(text: str) -> bool:
    return re.fullmatch(r"[\w.]+:[\w.]+", text) is not None


def _port_is_one(c: RunConfig) -> bool:
    port = c.observe.prometheus_port
    return port is None or 1 <= port <= 65535


OBSERVE_RULES: tuple[Rule, ...] = (
    Rule(
        "profile-within-steps",
        "observe.profile",
        _profile_fits,
        "with observe.profile_steps={c.observe.profile_steps} it goes past the end of the run "
        "(train.steps={c.train.steps}) or past its stop (train.stop_after={c.train.stop_after})",
        _earlier_profile,
    ),
    Rule(
        "callbacks-are-named",
        "observe.callbacks",
        lambda c: all(map(_names_function, c.observe.callbacks)),
        "each of them must name a module and a function in it",
        "write observe.callbacks=[MODULE:FUNCTION], such as watch:on_moment for watch.py",
    ),
    Rule(
        "prometheus-port-is-one",
        "observe.prometheus_port",
        _port_is_one,
        "a port lies between 1 and 65535",
        "a usual value is observe.prometheus_port=9630 (null turns the endpoint off)",
    ),
    Rule(
        "prometheus-host-is-used",
        "observe.prometheus_host",
        lambda c: c.observe.prometheus_port is not None or c.observe.prometheus_host == "127.0.0.1",
        "no endpoint listens there without observe.prometheus_port",
        "write observe.prometheus_port=9630, or leave observe.prometheus_host out",
    ),
)
