"""What the CRDs in the directory `SHARDWISE_CRDS` refuse: their schemas, and their CEL rules as
cel-python evaluates them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from crd_schemas import Crd, read_crds, rules_of, schema_faults

FOLDER = os.environ.get("SHARDWISE_CRDS")


@cache
def given_crds() -> dict[tuple[str, str], Crd]:
    """By version and kind; none where no directory is named."""
    return read_crds(Path(FOLDER)) if FOLDER else {}


@cache
def _program(rule: str) -> Any:
    # Only a run with CRDs needs the package.
    import celpy

    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def rule_faults(crd: Crd, manifest: Mapping[str, Any]) -> list[str]:
    """The messages of rules that do not hold. A rule that cannot be evaluated raises."""
    from celpy import json_to_cel

    return [
        f"{one.place}: {one.message}"
        for one in rules_of(crd, manifest)
        if not _program(one.rule).evaluate({"self": json_to_cel(one.value)})
    ]


def crd_faults(manifest: Mapping[str, Any]) -> list[str]:
    """What the CRD of a manifest refuses, where one is given."""
    crd = given_crds().get((manifest["apiVersion"], manifest["kind"]))
    return [] if crd is None else schema_faults(crd, manifest) or rule_faults(crd, manifest)
