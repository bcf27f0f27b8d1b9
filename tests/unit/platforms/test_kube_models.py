"""Manifests through the models that Kubeflow generates from its own API and JobSet's.

A model drops what it does not know, so nothing of ours may be missing after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from crd_mutants import Place, replaced
from kube_jobs import LAUNCHERS, VARIANTS, make_job, manifests_of

pytestmark = pytest.mark.skipif(
    find_spec("kubeflow_trainer_api") is None, reason="`make setup` installs Kubeflow's models"
)
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
# Every key of these is allowed.
FREE = ("labels", "annotations", "nodeSelector", "requests", "limits")


def read(manifest: dict[str, Any]) -> Any:
    # Here, because all workers would import two seconds' worth of models and one has these tests.
    from kubeflow_trainer_api import models

    return getattr(models, MODELS[manifest["kind"]]).from_dict(manifest).to_dict()


def lost(ours: Any, theirs: Any, place: str = "$") -> Iterator[str]:
    """Where a model has another value, or none. It may have more: defaults."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from lost(value, theirs.get(key), f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(*pair, f"{place}[{index}]")
    elif ours != theirs:
        yield f"{place}: {ours!r} became {theirs!r}"


def objects(value: Any, path: Place = ()) -> Iterator[Place]:
    if isinstance(value, dict):
        yield path
        for key, inner in value.items():
            if key not in FREE:
                yield from objects(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from objects(inner, (*path, index))


@pytest.mark.parametrize("on", ["jobset", "trainjob"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_keeps_every_field(on: str, variant: str, tmp_path: Path) -> None:
    text, overrides = VARIANTS[variant]
    kinds = 0
    for manifest in manifests_of(LAUNCHERS[on], make_job(tmp_path, text, *overrides)):
        if manifest["kind"] in MODELS:
            assert list(lost(manifest, read(manifest))) == []
            kinds += 1
    assert kinds == {"jobset": 1, "trainjob": 2}[on]


@pytest.mark.parametrize("on", ["jobset", "trainjob"])
def test_a_field_that_a_model_does_not_know_is_noticed(on: str, tmp_path: Path) -> None:
    places = 0
    for manifest in manifests_of(LAUNCHERS[on], make_job(tmp_path)):
        for path in objects(manifest) if manifest["kind"] in MODELS else ():
            wrong = replaced(manifest, (*path, "unheardOf"), "1")
            assert list(lost(wrong, read(wrong))), path
            places += 1
    assert places > 20
