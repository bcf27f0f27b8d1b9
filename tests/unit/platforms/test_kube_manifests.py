"""Manifests against strict schemas and admission rules, and the whole text of each kind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from kube_admission import admission_faults
from kube_jobs import CPUS, GOLDEN, GPUS, LAUNCHERS, VARIANTS, make_job, manifests_of
from kube_schemas import RESOURCES_SERVED, schema_faults

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.platforms.explained import Because, plain, to_yaml
from shardwise.platforms.kubernetes.kube_names import LONGEST, kube_name


@pytest.mark.parametrize("on", LAUNCHERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_manifest_is_accepted_strictly(on: str, variant: str, tmp_path: Path) -> None:
    text, overrides = VARIANTS[variant]
    store = {}
    for manifest in manifests_of(LAUNCHERS[on], make_job(tmp_path, text, *overrides)):
        resource = next(one for one in RESOURCES_SERVED if one.kind == manifest["kind"])
        assert schema_faults(resource, manifest) == []
        assert admission_faults(manifest, store) == []
        store[manifest["kind"], manifest["metadata"]["name"]] = manifest


@pytest.mark.parametrize("on", LAUNCHERS)
def test_the_text_of_each_kind(on: str, tmp_path: Path) -> None:
    """The ConfigMap stands in another file: it has every setting, and grows with each new one."""
    job = make_job(tmp_path, GPUS, "kubernetes.topology=rack", "launch.exclude=[node-3]")
    text = LAUNCHERS[on].render(job).main.text
    path = GOLDEN / f"{on}.yaml"
    if os.environ.get("SHARDWISE_WRITE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("on", LAUNCHERS)
def test_pods_read_the_same_run(on: str, tmp_path: Path) -> None:
    """The ConfigMap's text is the configuration, but for where pods see the run directory."""
    overrides = ("runs_dir=runs", "train.steps=7", "optim.lr=3e-5")
    job = make_job(tmp_path, GPUS, *overrides)
    data = manifests_of(LAUNCHERS[on], job)[0]["data"]
    (tmp_path / "read.yaml").write_text(data["run.yaml"])
    read = load_config(str(tmp_path / "read.yaml"))
    assert (read.name, read.train.steps, read.optim.lr) == ("first", 7, 3e-5)


def test_runs_of_this_directory_are_below_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobset = LAUNCHERS["jobset"]

    def runs_dir(*overrides: str) -> str:
        text = manifests_of(jobset, make_job(tmp_path, GPUS, *overrides))[0]["data"]["run.yaml"]
        return str(yaml.safe_load(text)["runs_dir"])

    assert runs_dir("runs_dir=mine/runs") == "/shared/mine/runs"
    assert runs_dir("runs_dir=/shared/elsewhere") == "/shared/elsewhere"
    with pytest.raises(UserError, match="is not on the shared volume"):
        runs_dir("runs_dir=/scratch")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("kubernetes.image=null", "kubernetes.image is not set"),
        ("kubernetes.claim=null", "kubernetes.claim is not set"),
        ("launch.options=[--partition=gpu]", "launch.options would have no effect"),
    ],
)
def test_what_does_not_suit_kubernetes_is_refused(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        LAUNCHERS["volcano"].render(make_job(tmp_path, GPUS, override))


def test_the_machine_of_the_command_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is the machine that this command runs on"):
        LAUNCHERS["jobset"].render(make_job(tmp_path, CPUS, "cluster.name=local"))


def test_comments_give_the_reasons_and_change_nothing() -> None:
    data = {
        "a": Because({"b": Because([1, Because("no", "a word")], "a list")}, "why " * 40),
        "text": "one: 1\n\n  two\n",
        "empty": {},
        "items": [{"x": Because("v", "first key"), "z": [Because({"k": "1e3"}, "deep")]}, []],
        "odd": ["on", "0o17", "1_000", "~", "", "a: b", "# no", "é\n", "- x", "2026-11-18"],
    }
    text = to_yaml(data, {"second": True})
    assert list(yaml.safe_load_all(text)) == [plain(data), {"second": True}]
    assert max(map(len, text.splitlines())) <= 100
    above = text.splitlines()
    assert above[above.index("  - x: v") - 1] == "  # First key."
    assert to_yaml(plain(data)) == "".join(
        f"{line}\n" for line in to_yaml(data).splitlines() if not line.lstrip().startswith("# ")
    )


def test_names_are_labels_and_stay_apart() -> None:
    assert kube_name("run-1") == "run-1"
    odd = ["Run.1", "run_1", "1run", "é", "x" * 80, "x" * 81, "-", "a-", "RUN.1"]
    made = [kube_name(name) for name in odd]
    assert len(set(made)) == len(odd)
    for name in made:
        assert len(name) <= LONGEST and name.isascii() and name[0].isalpha()
        assert kube_name(name) == name
