"""Manifests against the CRDs of JobSet, Trainer and Volcano themselves: their schemas, strictly,
and their CEL rules. The definitions are theirs, so they are read where somebody put them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from crd_mutants import Place, mutants, replaced
from crd_rules import FOLDER, crd_faults, given_crds, rule_faults
from crd_schemas import rules_of, schema_faults
from kube_jobs import GOLDEN, LAUNCHERS, VARIANTS, make_job, manifests_of

pytestmark = pytest.mark.skipif(
    not FOLDER,
    reason="SHARDWISE_CRDS names no directory of CRDs: `make crds` downloads them and runs this",
)
GOLDENS = [
    manifest
    for path in sorted(GOLDEN.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]
KINDS = [one["kind"] for one in GOLDENS]
IN_ORDER = {"startupPolicyOrder": "InOrder"}
AFTER = [{"name": "node", "status": "Ready"}]
OF_RUNTIME = ("spec", "template", "spec")
# Changes that break each rule which our manifests meet.
BREAKS: tuple[tuple[str, dict[Place, Any]], ...] = (
    ("TrainJob", {("metadata", "name"): "First.Run"}),
    ("TrainJob", {("metadata", "name"): "a" * 64}),
    ("TrainJob", {("spec", "managedBy"): "somebody.else"}),
    ("TrainJob", {("spec", "trainer", "numProcPerNode"): 0}),
    ("TrainingRuntime", {("spec", "mlPolicy", "mpi"): {}}),
    # Jobs start in order, or each after another, but not both.
    (
        "TrainingRuntime",
        {
            (*OF_RUNTIME, "startupPolicy"): IN_ORDER,
            (*OF_RUNTIME, "replicatedJobs", 0, "dependsOn"): AFTER,
        },
    ),
    (
        "JobSet",
        {
            ("spec", "startupPolicy"): IN_ORDER,
            ("spec", "replicatedJobs", 0, "dependsOn"): AFTER,
        },
    ),
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("on", LAUNCHERS)
def test_a_crd_accepts_every_manifest(on: str, variant: str, tmp_path: Path) -> None:
    text, overrides = VARIANTS[variant]
    for manifest in manifests_of(LAUNCHERS[on], make_job(tmp_path, text, *overrides)):
        if manifest["kind"] != "ConfigMap":
            assert (manifest["apiVersion"], manifest["kind"]) in given_crds()
            assert crd_faults(manifest) == []


@pytest.mark.parametrize("manifest", GOLDENS, ids=KINDS)
def test_a_crd_accepts_the_golden_file_and_none_of_its_mutants(manifest: Any) -> None:
    crd = given_crds()[manifest["apiVersion"], manifest["kind"]]
    assert schema_faults(crd, manifest) == []
    refused: Counter[str] = Counter()
    for mutant in mutants(crd, manifest):
        assert schema_faults(crd, mutant.manifest), (mutant.fault, mutant.path)
        refused[mutant.fault] += 1
    print(f"{crd.api_version} {crd.kind}: refused {refused.total()} mutants: {dict(refused)}")
    assert {"type", "unknown field", "required"} <= set(refused)


def broken(manifest: Any) -> Iterator[Any]:
    for kind, changes in BREAKS:
        if kind == manifest["kind"]:
            made = manifest
            for path, value in changes.items():
                made = replaced(made, path, value)
            yield made


@pytest.mark.parametrize("manifest", GOLDENS, ids=KINDS)
def test_each_cel_rule_that_a_manifest_meets_can_refuse_it(manifest: Any) -> None:
    crd = given_crds()[manifest["apiVersion"], manifest["kind"]]
    assert rule_faults(crd, manifest) == []
    met = {one.message for one in rules_of(crd, manifest)}
    refused = {fault for one in broken(manifest) for fault in rule_faults(crd, one)}
    missing = [one for one in met if not any(fault.endswith(one) for fault in refused)]
    print(f"{crd.api_version} {crd.kind}: met and broke {len(met)} CEL rules")
    assert missing == []
