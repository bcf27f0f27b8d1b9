"""Rules about values that SkyPilot would refuse, or put to another use."""

from __future__ import annotations

import re

from shardwise.config.kubernetes_rules import is_mount
from shardwise.config.rule import Rule
from shardwise.config.schema import RunConfig
from shardwise.config.schema_text import value_at

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _word_rule(field: str, example: str, needs: str) -> Rule:
    def holds(config: RunConfig) -> bool:
        word = value_at(config, field)
        return word is None or bool(re.fullmatch(r"[\w*][\w*./:@-]{0,499}", word, re.ASCII))

    return Rule(f"{field}-is-a-word", field, holds, needs, f"write {field}={example}")


SKYPILOT_RULES: tuple[Rule, ...] = (
    _word_rule("skypilot.infra", "k8s", "it is a cloud, a region of one, or k8s"),
    _word_rule("skypilot.volume", "training", "it is the name of a volume: sky volumes ls"),
    _word_rule("skypilot.accelerator", "H100", "it is the name of a GPU: sky gpus list"),
    _word_rule("skypilot.image", "docker:registry.example.com/a:1", "it is the name of an image"),
    Rule(
        "skypilot-mount-is-a-directory",
        "skypilot.mount",
        lambda c: is_mount(c.skypilot.mount),
        "it is the absolute path of a directory, without `:`, `..` or a slash at its end",
        "write skypilot.mount=/shared",
    ),
    Rule(
        "skypilot-file-mounts-are-paths",
        "skypilot.file_mounts",
        lambda c: all(
            where.startswith(("/", "~/")) and source.strip()
            for where, source in c.skypilot.file_mounts.items()
        ),
        "each is a path on the nodes with what is copied to it",
        "write skypilot.file_mounts={{/data: s3://bucket/data}}, or leave it out",
    ),
    Rule(
        "skypilot-secrets-are-variables",
        "skypilot.secrets",
        lambda c: all(_VARIABLE.fullmatch(name) for name in c.skypilot.secrets),
        "each is the name of a variable, never its value",
        "write skypilot.secrets=[HF_TOKEN], or leave it out",
    ),
)
