"""Rules about names and quantities that Kubernetes would refuse."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from shardwise.config.rule import Rule
from shardwise.config.schema import RunConfig
from shardwise.config.schema_text import value_at

_PART = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_PART}(\.{_PART})*")
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"({_PART}(\.{_PART})*/)?{_WORD}")
_VALUE = re.compile(rf"({_WORD})?")
_QUANTITY = re.compile(r"[0-9]{1,15}(\.[0-9]{1,3})?(m|k|[KMGTP]i?)?")
_LONGEST_NAME = 253


def _name_rule(field: str, example: str) -> Rule:
    def holds(config: RunConfig) -> bool:
        name = value_at(config, field)
        return name is None or (len(name) <= _LONGEST_NAME and bool(_NAME.fullmatch(name)))

    return Rule(
        f"{field}-is-a-name",
        field,
        holds,
        "a name in Kubernetes has lower-case letters, digits, `-` and `.`",
        f"write {field}={example}",
    )


def _are_keys(names: Iterable[str]) -> bool:
    return all(_KEY.fullmatch(name) for name in names)


def is_mount(path: str) -> bool:
    """Whether a volume can be mounted there."""
    clean = path == str(PurePosixPath(path)) and ":" not in path and path.isprintable()
    return clean and path.startswith("/") and path != "/" and ".." not in path.split("/")


KUBERNETES_RULES: tuple[Rule, ...] = (
    _name_rule("kubernetes.claim", "training"),
    _name_rule("kubernetes.namespace", "default"),
    _name_rule("kubernetes.queue", "gpus"),
    _name_rule("kubernetes.secret", "tokens"),
    _name_rule("kubernetes.pull_secret", "registry"),
    _name_rule("kubernetes.service_account", "trainer"),
    Rule(
        "kubernetes-image-is-a-word",
        "kubernetes.image",
        lambda c: (
            c.kubernetes.image is None
            or bool(re.fullmatch(r"[\w][\w./:@-]{0,499}", c.kubernetes.image, re.ASCII))
        ),
        "it is the name of an image in a registry, with its tag",
        "write kubernetes.image=registry.example.com/shardwise:0.1",
    ),
    Rule(
        "kubernetes-context-is-a-word",
        "kubernetes.context",
        lambda c: (
            c.kubernetes.context is None
            or (c.kubernetes.context.isprintable() and bool(c.kubernetes.context.strip()))
        ),
        "it is the name of a context in the kubeconfig",
        "kubectl config get-contexts shows them; leave it out for the current one",
    ),
    Rule(
        "kubernetes-mount-is-a-directory",
        "kubernetes.mount",
        lambda c: is_mount(c.kubernetes.mount),
        "it is the absolute path of a directory, without `:`, `..` or a slash at its end",
        "write kubernetes.mount=/shared",
    ),
    Rule(
        "kubernetes-topology-is-a-label",
        "kubernetes.topology",
        lambda c: c.kubernetes.topology is None or _are_keys([str(c.kubernetes.topology)]),
        "it is the name of a node label, or a tier of Volcano",
        "write kubernetes.topology=cloud.provider.com/topology-rack",
    ),
    Rule(
        "kubernetes-topology-required-needs-one",
        "kubernetes.topology_required",
        lambda c: not c.kubernetes.topology_required or c.kubernetes.topology is not None,
        "kubernetes.topology does not say what the pods should share",
        "write kubernetes.topology=cloud.provider.com/topology-rack, or leave it out",
    ),
    Rule(
        "kubernetes-resources-are-quantities",
        "kubernetes.resources",
        lambda c: (
            _are_keys(c.kubernetes.resources)
            and all(_QUANTITY.fullmatch(str(one)) for one in c.kubernetes.resources.values())
        ),
        "each is the name of a resource with a quantity such as 8, 500m or 900Gi",
        "write kubernetes.resources={{cpu: 96, memory: 900Gi}}, or leave it out",
    ),
    Rule(
        "kubernetes-gpus-are-the-plans",
        "kubernetes.resources",
        lambda c: "nvidia.com/gpu" not in c.kubernetes.resources,
        "cluster.name says how many GPUs a node has",
        "write cluster.name=2x8xH100 for 8 GPUs on each of 2 nodes, and leave nvidia.com/gpu out",
    ),
    Rule(
        "kubernetes-node-selector-has-labels",
        "kubernetes.node_selector",
        lambda c: (
            _are_keys(c.kubernetes.node_selector)
            and all(_VALUE.fullmatch(one) for one in c.kubernetes.node_selector.values())
        ),
        "each is a node label with its value",
        "write kubernetes.node_selector={{pool: h100}}, or leave it out",
    ),
    Rule(
        "kubernetes-tolerate-has-keys",
        "kubernetes.tolerate",
        lambda c: _are_keys(c.kubernetes.tolerate),
        "each is the key of a taint",
        "write kubernetes.tolerate=[nvidia.com/gpu], or leave it out",
    ),
)
