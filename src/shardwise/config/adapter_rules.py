"""Rules about the adapter section, as rows."""

from __future__ import annotations

from dataclasses import fields

from shardwise.config.rule import Rule, above_zero, at_least, path_rule
from shardwise.config.schema import FLOAT8_FORMATS, AdapterConfig, RunConfig
from shardwise.config.schema_text import value_at

_DEFAULTS = RunConfig()


def _needs_method(field: str) -> Rule:
    """A row for a setting that has no effect without adapters."""

    def holds(config: RunConfig) -> bool:
        given = value_at(config, field) != value_at(_DEFAULTS, field)
        return config.adapter.method != "none" or not given

    return Rule(
        f"{field}-needs-method",
        field,
        holds,
        "adapter.method is none, so it would be ignored",
        f"write adapter.method=lora, or leave {field} out",
    )


def _has_targets(config: RunConfig) -> bool:
    targets = config.adapter.targets
    return bool(targets) and all(targets)


ADAPTER_RULES: tuple[Rule, ...] = (
    *(_needs_method(f"adapter.{item.name}") for item in fields(AdapterConfig)[1:]),
    *at_least(1, "adapter.rank"),
    above_zero("adapter.alpha", "32"),
    path_rule("adapter.weights_from"),
    Rule(
        "adapter-dropout-range",
        "adapter.dropout",
        lambda c: 0 <= c.adapter.dropout < 1,
        "it must be at least 0 and below 1",
        "a usual value is adapter.dropout=0.05",
    ),
    Rule(
        "adapter-has-targets",
        "adapter.targets",
        _has_targets,
        "it names no layer",
        "write adapter.targets=all-linear, or adapter.targets=[q_proj,v_proj]",
    ),
    Rule(
        "float8-base-needs-range",
        "adapter.base",
        lambda c: c.adapter.base != "float8" or c.precision.param != "fp16",
        "precision.param is fp16, whose range is too small for products of weights that are still "
        "to be scaled",
        "write precision.param=bf16, or leave precision.param out",
    ),
    Rule(
        "adapted-experts-are-not-float8",
        "precision.experts",
        lambda c: c.adapter.method == "none" or c.precision.experts == "param",
        "experts with adapters have matmuls of their own",
        "leave precision.experts out, or write adapter.method=none",
    ),
    Rule(
        "adapters-are-not-float8",
        "precision.linear",
        lambda c: c.adapter.method == "none" or c.precision.linear not in FLOAT8_FORMATS,
        "it casts weights that are trained, and adapters freeze them",
        "leave precision.linear out and write adapter.base=float8, or write adapter.method=none",
    ),
)
