"""Rules about optimizers other than AdamW, as rows."""

from __future__ import annotations

from operator import attrgetter

from shardwise.config.rule import Rule
from shardwise.config.schema import OptimConfig, RunConfig

_USUAL = OptimConfig()


def _is_adamw(config: RunConfig) -> bool:
    return config.optim.name == "adamw"


def _with_adamw(setting: str, needs: str, *fine: object) -> Rule:
    """A row for a setting that only AdamW goes with."""
    read = attrgetter(setting)
    return Rule(
        f"{setting}-is-adamws",
        setting,
        lambda c: _is_adamw(c) or read(c) in fine,
        f"optim.name={{c.optim.name}} {needs}",
        f"leave {setting} out, or write optim.name=adamw",
    )


def _unused(name: str, setting: str) -> Rule:
    """A row for a number that the optimizer `name` does not have."""
    read = attrgetter(setting.removeprefix("optim."))
    return Rule(
        f"{setting}-is-not-of-{name}",
        setting,
        lambda c: c.optim.name != name or read(c.optim) == read(_USUAL),
        f"optim.name={name} has no such number, so it would be ignored",
        f"leave {setting} out, or write optim.name=adamw",
    )


OPTIMIZER_RULES: tuple[Rule, ...] = (
    _with_adamw("optim.state", "keeps its state in fp32", "fp32"),
    _with_adamw("optim.fused", "has no fused kernel", "auto", False),
    _with_adamw("memory.offload", "updates parameters on the device", "none"),
    _with_adamw("memory.offload_optimizer", "has no moments that come in pages", False),
    _with_adamw("precision.linear", "was not tried with float8 weights", "auto", "param"),
    Rule(
        "optimizer-of-one-site",
        "optim.name",
        lambda c: _is_adamw(c) or c.num_sites == 1,
        "there are {c.num_sites} sites, and only AdamW's state was tried between them",
        "write optim.name=adamw, or mesh.site=1",
    ),
    _unused("adafactor", "optim.betas"),
    _unused("adafactor", "optim.eps"),
    _unused("lion", "optim.eps"),
)
